"""A comparison of several arrays, as all tests of kernels that walk over chunks make it."""

import numpy as np


def assert_near(names, got, expected, tolerance):
    """Checks that all arrays are finite, and differ by at most `tolerance` of their norm, or of 1."""
    for name, a, e in zip(names, got, expected, strict=True):
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        assert np.isfinite(a).all(), name
        assert np.linalg.norm(a - e) <= tolerance * max(np.linalg.norm(e), 1.0), (name, np.linalg.norm(a - e))
