"""Benchmarks: `lm bench`."""
