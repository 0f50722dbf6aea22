"""The delta rule: inputs that may lack, and a parity."""

import jax.numpy as jnp
import mechanisms
import numpy as np

from lm.attention.recurrent.delta import Delta


def test_without_gate_logits_a_token_learns_half_of_the_difference():
    config = Delta(gate=True, negative=True)
    module, (q, k, v, beta, gate) = mechanisms.build(config), mechanisms.draw_inputs(config)
    np.testing.assert_array_equal(module(q, k, v), module(q, k, v, jnp.zeros_like(beta), jnp.zeros_like(gate)))


def test_one_key_holds_a_parity():
    """With beta = 2, a token flips the sign of the value stored under its key. With beta at most 1, no token can."""
    flips = np.random.default_rng(0).random(100) < 0.5
    q = k = jnp.ones((1, 101, 1, 1))
    v = jnp.ones((1, 101, 1, 1)).at[0, 1:].set(0.0)
    beta = jnp.where(jnp.asarray([False, *flips]), 20.0, -20.0)[None, :, None].at[0, 0].set(0.0)
    module = Delta(negative=True).build(mechanisms.HeadDims(1, 1, 1), mechanisms.nnx.Rngs(0))
    signs = np.sign(module(q, k, v, beta)[0, 1:, 0, 0])
    np.testing.assert_array_equal(signs, (-1.0) ** np.cumsum(flips))
