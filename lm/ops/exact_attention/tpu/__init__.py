"""Exact attention in Pallas kernels for TPUs."""
