"""Mechanisms with decay against recurrences over tokens in float64: values, gradients, decoding, initial gates."""

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
from lm.attention.recurrent.retention import Retention
from lm.attention.softmax import Softmax
from lm.errors import ConfigError
from lm.ops import exact_attention

GATED = {
    'retention': Retention(),
    'sigmoid': GatedLinear(),
    'power': GatedLinear(degree=2),
    'ssd': GatedLinear(gate='ssd'),
    'channel': GatedLinear(gate='channel'),
    'softmax': Softmax(gate=True),
    'softmax window': Softmax(gate=True, window=7),
    'polynomial': Polynomial(gate=True),
    'polysketch': Polysketch(gate=True, block=16, degree=2),
}


def inputs(config, **options):
    arrays = mechanisms.draw(**options)
    widths = config.projections(mechanisms.DIMS).values()
    shapes = [(*arrays[1].shape[:2], width) for width in widths]
    return [*arrays, *(jax.random.normal(jax.random.key(9), shape).astype(arrays[0].dtype) for shape in shapes)]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def layer_norm(values, name, x):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * values[f'{name}/scale'] + values[f'{name}/bias']


def exact(weigh, factors, v, window=None, bias=0.0):
    """Computes token by token: each token's factor multiplies the weights of all keys so far."""
    (batch, length, heads), groups = factors.shape, weigh.shape[1] // factors.shape[2]
    o, faded = np.zeros((batch, length, weigh.shape[1], v.shape[-1])), np.zeros((batch, heads, length))
    for i in range(length):
        faded *= factors[:, i, :, None]
        faded[:, :, i] = 1.0
        w = weigh[:, :, i] * np.repeat(faded, groups, axis=1)
        w[..., : max(0, i + 1 - (window or length))] = 0.0
        mixed = np.einsum('bhm,bmhd->bhd', w, mechanisms.repeat_heads(v, weigh.shape[1]))
        o[:, i] = mixed / (bias + w.sum(-1, keepdims=True))
    return o


def recurrent(q, k, u, factors, degree, skipped=0.0):
    """Computes token by token: each key head has a state; outputs are RMS-normalized."""
    groups, size = q.shape[2] // k.shape[2], q.shape[-1]
    phi = (lambda x: x) if degree == 1 else (lambda x: (x[..., :, None] * x[..., None, :]).reshape(*x.shape[:-1], -1))
    q, k = phi(q * size**-0.5), phi(k)
    state, o = np.zeros((*k.shape[::2], k.shape[3], size)), []
    for i in range(q.shape[1]):
        state = factors[:, i, ..., None] * state + k[:, i, :, :, None] * u[:, i, :, None, :]
        o.append(np.einsum('bhf,bhfd->bhd', q[:, i], np.repeat(state, groups, axis=1)))
    o = np.stack(o, 1) + skipped
    return o / np.sqrt((o**2).mean(-1, keepdims=True) + 1e-5)


def reference(config, values, q, k, v, gate=None):
    if isinstance(config, Retention):
        factors = np.broadcast_to(1 - 2.0 ** (-5 - np.arange(k.shape[2])), k.shape[:3])
        return recurrent(q, k, v, factors[..., None], 1) * values['out_norm/scale']
    if isinstance(config, GatedLinear) and config.gate == 'channel':
        logits = (gate @ values['gate/logits/kernel']).reshape(k.shape) + values['gate/logits/bias']
        return recurrent(q, k, v, sigmoid(logits) ** (1 / 16), 1) * values['out_norm/scale']
    logits = gate + values['gate/bias']
    if isinstance(config, GatedLinear) and config.gate == 'ssd':
        step = np.log1p(np.exp(logits))
        skipped = values['gate/skip'][:, None] * mechanisms.repeat_heads(v, q.shape[2])
        factors = np.exp(-np.exp(values['gate/log_rate']) * step)[..., None]
        o = recurrent(q, k, v * step[..., None], factors, 1, skipped)
        return o * values['out_norm/scale']
    if isinstance(config, GatedLinear):
        return recurrent(q, k, v, sigmoid(logits)[..., None], config.degree) * values['out_norm/scale']
    if isinstance(config, Softmax):
        weigh = np.exp(mechanisms.scores(q, k) * q.shape[-1] ** -0.5)
        return exact(weigh, sigmoid(logits), v, config.window)
    q, k = layer_norm(values, 'q_norm', q), layer_norm(values, 'k_norm', k)
    return exact(mechanisms.scores(q, k) ** config.degree, sigmoid(logits), v, bias=1.0)


@pytest.mark.parametrize('name', GATED)
def test_agrees_with_the_recurrence(name):
    config = GATED[name]
    module = mechanisms.build(config)
    # No denominator keeps normalized outputs near the values, so they lose more in bfloat16.
    half = 4e-2 if isinstance(config, GatedLinear | Retention) else 2e-2
    mechanisms.check_values(module, reference, inputs(config), tolerance=2e-5, half_tolerance=half)


@pytest.mark.parametrize('name', ['ssd', 'channel', 'softmax window', 'polynomial', 'polysketch'])
def test_gradients(name):
    config = GATED[name]
    mechanisms.check_gradients(mechanisms.build(config), reference, inputs(config, length=20), tolerance=1e-4)


@pytest.mark.parametrize('name', ['ssd', 'channel', 'softmax window'])
def test_decoding(name):
    config = GATED[name]
    module = mechanisms.build(config)
    mechanisms.check_steps(module, inputs(config))
    mechanisms.check_no_leak(module, inputs(config))


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
    found, expected = (mechanisms.apply(one, *inputs(config)) for one in (module, exact_module))
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


def test_a_gate_that_is_open_changes_nothing():
    q, k, v, _ = inputs(Softmax(gate=True))
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
    np.testing.assert_allclose(y, expected * sigmoid(expected), rtol=1e-5, atol=1e-6)
    state, parts = module.init_state(2, jnp.float32), []
    for cut in (slice(0, 1), slice(1, 3), slice(3, 11)):
        # Any number of pieces gives the same result.
        part, state = module(jnp.split(x[:, cut], [2], axis=-1), state)
        parts.append(jnp.concatenate(part, axis=-1))
    np.testing.assert_allclose(jnp.concatenate(parts, 1), y, rtol=1e-6, atol=1e-7)
