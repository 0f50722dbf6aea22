"""Deferred arrays give what NumPy gives at once, and read nothing before."""

import numpy as np
import pytest

from lm.interop.deferred import Deferred

A, B = (np.random.default_rng(seed).normal(size=(4, 6)).astype(np.float32) for seed in (0, 1))
FUNCTIONS = {
    'sum': lambda a, b: a + np.float32(1) - b * 2 / np.float32(3),
    'turned': lambda a, b: a.T,
    'shapes': lambda a, b: a.reshape(2, -1, 3).swapaxes(0, 1).reshape((-1,)),
    'joined': lambda a, b: np.concatenate([a, b, a[:1]]),
    'beside': lambda a, b: np.concatenate([a, b], axis=-1),
    'stacked': lambda a, b: np.stack([a.T, b.T], axis=1),
    'cut': lambda a, b: np.split(a, [1, 4], axis=1)[1],
    'halves': lambda a, b: np.split(a, 2)[1],
    'rows': lambda a, b: a[[3, 1]][:, 2],
    'stretched': lambda a, b: a + b[0],
    'others': lambda a, b: np.tile(a, 2),
    'contiguous': lambda a, b: np.ascontiguousarray(a.T),
}


@pytest.mark.parametrize('name', FUNCTIONS)
def test_functions_are_taken_down(name):
    reads = []
    a, b = (Deferred(x.shape, lambda x=x: reads.append(x) or x) for x in (A, B))
    found, expected = FUNCTIONS[name](a, b), FUNCTIONS[name](A, B)
    assert found.shape == expected.shape
    if name not in ('others', 'contiguous'):  # these compute at once
        assert isinstance(found, Deferred)
        assert not reads
    np.testing.assert_array_equal(np.asarray(found), expected)


def test_sizes_are_known_before():
    a = Deferred([4, 6], lambda: A)
    assert (a.shape, a.ndim, a.size, a.nbytes, len(a), a.dtype) == ((4, 6), 2, 24, 96, 4, np.float32)
    assert np.array_equal(a, A)


def test_wrong_shapes_are_errors_at_once():
    a, b = Deferred((4, 6), lambda: A), Deferred((4, 5), lambda: B)
    for wrong in (lambda: np.concatenate([a, b]), lambda: a + b, lambda: a.reshape(5, 5), lambda: np.split(a, 5)):
        with pytest.raises(ValueError, match=r'shape|broadcast|multiple'):
            wrong()
    with pytest.raises(ValueError, match=r'an array is \[4, 6\], not \[4, 5\]'):
        np.asarray(b)
