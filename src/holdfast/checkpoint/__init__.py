"""Checkpoints: when they are due, how versions are uploaded, the record that makes them count, and what is kept."""
