"""Faults on purpose: named points at which a test can make a task or the driver fail."""
