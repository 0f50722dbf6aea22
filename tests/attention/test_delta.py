"""The delta rule against its recurrence in float64: values, gradients, decoding, and a parity."""

import jax
import jax.numpy as jnp
import mechanisms
import numpy as np
import pytest

from lm.attention.recurrent.delta import Delta

FORMS = {
    'plain': Delta(),
    'gate': Delta(gate=True),
    'negative': Delta(negative=True),
    'both': Delta(gate=True, negative=True),
    'channel': Delta(gate='channel', negative=True),
}
EACH = pytest.mark.parametrize('config', FORMS.values(), ids=FORMS)


def inputs(config, **options):
    arrays = mechanisms.draw(**options)
    widths = config.projections(mechanisms.DIMS).values()
    keys = jax.random.split(jax.random.key(9), len(widths))
    return [
        *arrays,
        *(
            jax.random.normal(key, (*arrays[1].shape[:2], width)).astype(arrays[0].dtype)
            for key, width in zip(keys, widths, strict=True)
        ),
    ]


def unit(x):
    return x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)


def reference(config, values, q, k, v, beta, gate=None):
    factors = np.ones((*k.shape[:3], 1))
    if config.gate == 'channel':
        logits = (gate @ values['gate/logits/kernel']).reshape(k.shape) + values['gate/logits/bias']
        factors = np.exp(-np.exp(values['gate/log_rate'])[:, None] * np.log1p(np.exp(logits)))
    elif config.gate:
        factors = np.exp(-np.exp(values['gate/log_rate']) * np.log1p(np.exp(gate + values['gate/bias'])))[..., None]
    beta = (2 if config.negative else 1) / (1 + np.exp(-beta))
    q, k, groups = unit(q) * q.shape[-1] ** -0.5, unit(k), q.shape[2] // k.shape[2]
    state, o = np.zeros((*k.shape[::2], k.shape[3], v.shape[3])), []
    for i in range(q.shape[1]):
        state = factors[:, i, :, :, None] * state
        new = beta[:, i, :, None] * (v[:, i] - np.einsum('bked,bke->bkd', state, k[:, i]))
        state = state + k[:, i, :, :, None] * new[:, :, None]
        o.append(np.einsum('bhed,bhe->bhd', np.repeat(state, groups, axis=1), q[:, i]))
    o = np.stack(o, axis=1)
    return o / np.sqrt((o**2).mean(-1, keepdims=True) + 1e-5) * values['out_norm/scale']


@EACH
def test_agrees_with_the_recurrence(config):
    mechanisms.check_values(mechanisms.build(config), reference, inputs(config), 2e-5)


@EACH
def test_gradients(config):
    mechanisms.check_gradients(mechanisms.build(config), reference, inputs(config), 2e-5)


@EACH
def test_decoding(config):
    assert mechanisms.check_steps(mechanisms.build(config), inputs(config)) == (2, 2, 16, 16)


@EACH
def test_no_token_sees_the_future(config):
    mechanisms.check_no_leak(mechanisms.build(config), inputs(config))


def test_without_gate_logits_a_token_learns_half_of_the_difference():
    config = FORMS['both']
    module, (q, k, v, beta, gate) = mechanisms.build(config), inputs(config)
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
