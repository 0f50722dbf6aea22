"""Benchmarks: `lm bench attention|step|kernels|data`."""
