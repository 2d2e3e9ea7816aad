"""Watermarks, windows, triggers and timers will live here; processing time is the epoch's planned clock."""
