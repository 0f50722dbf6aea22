"""Gradients of running sums of log factors."""

import jax
import numpy as np
import pytest

from lm.ops import decay as decays


@pytest.mark.parametrize('share', [0.0, 0.01, 0.3])
def test_gradients_in_tiles_are_those_of_the_loop(share):
    keys = jax.random.split(jax.random.key(0), 2)
    dtotal = jax.random.normal(keys[0], (3, 640))
    resets = jax.random.uniform(keys[1], dtotal.shape) < share
    got = decays.backwards_in_tiles(dtotal, resets, 64)
    np.testing.assert_allclose(got, decays.backwards(dtotal[None], resets[None])[0], atol=1e-4)
