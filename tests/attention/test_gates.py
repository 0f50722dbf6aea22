"""Gates of mechanisms with decay: special cases, initial rates, and the implementations of decay."""

import functools

import jax
import jax.numpy as jnp
import mechanisms
import numpy as np
import pytest
from flax import nnx

from lm.attention.polynomial import Polynomial
from lm.attention.polysketch import Polysketch
from lm.attention.recurrent.convolution import ShortConvolution
from lm.attention.recurrent.gate import ForgetGate
from lm.attention.recurrent.gated_linear import GatedLinear
from lm.attention.softmax import Softmax
from lm.errors import ConfigError
from lm.ops import exact_attention


def test_channels_have_no_factors_of_their_own_in_power_attention():
    with pytest.raises(
        ConfigError, match=r"gated_linear.degree = 2: .*; set gated_linear.gate = 'sigmoid', or degree = 1"
    ):
        GatedLinear(gate='channel', degree=2)


def test_gated_sketches_fade_like_exact_weights():
    """At degree 2 the sketch is exact: far and near weights have one formula for any block."""
    config = Polysketch(gate=True, degree=2, block=8)
    module = mechanisms.build(config)
    exact_module = mechanisms.build(Polynomial(gate=True, degree=2))
    found, expected = (mechanisms.apply(one, *mechanisms.draw_inputs(config)) for one in (module, exact_module))
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


def test_a_gate_that_is_open_changes_nothing():
    q, k, v, _ = mechanisms.draw_inputs(Softmax(gate=True))
    module = mechanisms.build(Softmax(gate=True))
    gate = jnp.full(k.shape[:3], 200.0)
    without = mechanisms.apply(mechanisms.build(Softmax()), q, k, v)
    np.testing.assert_allclose(mechanisms.apply(module, q, k, v, gate), without, rtol=0, atol=1e-6)


def test_gates_start_at_spread_rates():
    """Half-lives go from 7 to 690 tokens."""
    gate = ForgetGate(5)
    log_decay = gate.log_decay(jnp.zeros((1, 1, 5, 2)), None)[0, 0]
    np.testing.assert_allclose(-1 / log_decay, 10 * 10 ** (np.arange(5) / 2), rtol=1e-4)


@pytest.mark.parametrize('operation', ['softmax', 'polynomial'])
def test_exact_implementations_agree_on_decay(operation):
    """The cases have blocks that do not divide the length, resets, and queries of a cache; gradients count too."""
    q, k, v = mechanisms.draw()
    rng = np.random.default_rng(0)
    g = -rng.exponential(size=k.shape[:3]).astype(np.float32)
    g[:, 20] = -np.inf
    g[0, 33, 1] = -1e30
    call = getattr(exact_attention, f'{operation}_attention')
    call = functools.partial(call, degree=4) if operation == 'polynomial' else functools.partial(call, window=23)

    def run(implementation, block=None):
        @jax.jit
        def both(q, k, v, g):
            attend = functools.partial(call, implementation=implementation, block=block)
            o, pull = jax.vjp(lambda *x: attend(*x[:3], log_decay_BxMxK=x[3]), q, k, v, g)
            some = attend(q[:, 30:], k, v, log_decay_BxMxK=g, q_offset=30)
            return o, *pull(jnp.cos(jnp.arange(o.size)).reshape(o.shape)), some

        return both(q, k, v, g)

    expected = run('reference')
    for block in (16, None):
        for got, e in zip(run('xla', block), expected, strict=True):
            np.testing.assert_allclose(got, e, rtol=0, atol=1e-5 * max(1.0, np.abs(e).max()))
    assert np.isfinite(expected[4]).all()
    assert not np.asarray(expected[4][:, 20]).any()


def test_a_short_convolution_is_a_sum_over_the_last_tokens():
    module = ShortConvolution(6, 4, nnx.Rngs(0), 'attention')
    x = jax.random.normal(jax.random.key(0), (2, 11, 6))
    kernel, padded = np.asarray(module.kernel[...], np.float64), np.pad(np.asarray(x), ((0, 0), (3, 0), (0, 0)))
    expected = sum(kernel[s] * padded[:, 3 - s : 14 - s] for s in range(4))
    (y,), _ = module([x])
    np.testing.assert_allclose(y, expected / (1 + np.exp(-expected)), rtol=1e-5, atol=1e-6)
    state, parts = module.init_state(2, jnp.float32), []
    for cut in (slice(0, 1), slice(1, 3), slice(3, 11)):
        # Any number of pieces gives the same result.
        part, state = module(jnp.split(x[:, cut], [2], axis=-1), state)
        parts.append(jnp.concatenate(part, axis=-1))
    np.testing.assert_allclose(jnp.concatenate(parts, 1), y, rtol=1e-6, atol=1e-7)
