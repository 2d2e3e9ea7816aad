"""Benchmarks of holdfast against its peers and its limit; no part of the package."""
