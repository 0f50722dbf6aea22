"""TPU kernels after many tokens of strong decay, interpreted, against float64.

Sums of logs are then in the thousands, and the weights of the latest tokens depend on small differences of them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import interpret_kernels
from test_pallas_tpu import make_call, quick
from test_pallas_tpu_parts import by_kernels, on_parts

from lm.ops.delta_rule import DeltaCall
from lm.ops.delta_rule import xla as delta_xla
from lm.ops.delta_rule.tpu import rule
from lm.ops.linear_attention import PLAIN, SQUARE, xla
from lm.ops.linear_attention.tpu import attention
from lm.ops.linear_attention.types import Options, PolynomialKernel
from lm.ops.tpu.decay import block_sums

pytestmark = pytest.mark.usefixtures('no_races')
LENGTH, SIZE = 290, 16
ALLOWED = 4
"""The largest error of the kernels, in units of the error of XLA, plus 1e-6.

Both errors depend on the order in which a processor sums. With one float32 number per sum the error is 2e-4.
"""
OF_LOGS = 3e-5
"""The allowance for gradients of logs, which are differences of sums over tokens."""

ATTENTION = {
    'exact blocks': Options(SQUARE, local=PolynomialKernel(4), block=256),
    'series': Options((1.0, 1.0, 0.5), denominator_bias=0.5),
    'features, sums alone': Options(PLAIN, normalize=False),
}


def draw_logs(rng, shape):
    """Draws logs of −20.3 and −100.7 among others; the last 30 of each 110 tokens have small ones and zeros.

    Documents begin at some tokens.
    """
    strong = rng.choice([-20.3, -100.7, -0.3, 0.0], p=[0.4, 0.4, 0.1, 0.1], size=shape)
    small = -rng.exponential(size=shape) * rng.choice([0.0, 0.02, 0.3], size=shape)
    logs = np.where(np.arange(shape[1])[:, None] % 110 < 80, strong, small)
    logs[:, [0, 41, 270]] = -np.inf
    return logs.astype(np.float32)


def draw():
    """Returns q, k, v, logs of factors, q_local, k_local; two queries share a key."""
    rng = np.random.default_rng(0)
    q, k, v, *local = (0.4 * rng.normal(size=(1, LENGTH, n, SIZE)).astype(np.float32) for n in (2, 1, 1, 2, 1))
    return [np.abs(q), np.abs(k), v, draw_logs(rng, (1, LENGTH, 1)), *local]


def by_definition(options, q, k, v, g, *local):
    """Computes the outputs of all weights at once."""
    c, i, j = jnp.cumsum(jnp.maximum(g, -1e3), axis=1)[..., 0], np.arange(LENGTH)[:, None], np.arange(LENGTH)
    s = jnp.einsum('blhe,bme->bhlm', q, k[:, :, 0])
    w = sum(power * s**n for n, power in enumerate(options.powers))
    if local:
        near = i // options.block == j // options.block
        w = jnp.where(near, jnp.einsum('blhe,bme->bhlm', local[0], local[1][:, :, 0]) ** options.local.degree, w)
    w *= jnp.exp(jnp.where(j <= i, c[:, :, None] - c[:, None], -jnp.inf))[:, None]
    o = jnp.einsum('bhlm,bmd->blhd', w, v[:, :, 0])
    return o / (options.denominator_bias + w.sum(-1)).swapaxes(1, 2)[..., None] if options.normalize else o


def token_by_token(q, k, v, beta, logs):
    """Computes the outputs of the delta rule, or without β of a plain sum, with a factor per channel of the key."""

    def step(state, token):
        q, k, v, beta, logs = token
        state *= jnp.exp(jnp.maximum(logs, -1e3))[..., None]
        new = v if beta is None else beta[..., None] * (v - jnp.einsum('bked,bke->bkd', state, k))
        state += k[..., :, None] * new[..., None, :]
        return state, jnp.einsum('bed,bhe->bhd', state[:, 0], q)

    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v, beta, logs))
    return jnp.moveaxis(jax.lax.scan(step, jnp.zeros((1, 1, SIZE, SIZE)), tokens)[1], 0, 1)


def differentiate(function, arrays, dtype):
    """Returns outputs, and the gradients of all arrays."""

    def both(*arrays):
        o, pull = jax.vjp(function, *arrays)
        return o, *pull(jnp.cos(jnp.arange(o.size)).reshape(o.shape).astype(o.dtype))

    return [np.asarray(x, np.float64) for x in quick(both)(*(jnp.asarray(x, dtype) for x in arrays))]


def in_float64(function, arrays):
    with jax.enable_x64():
        return differentiate(function, arrays, np.float64)


def measure(found, expected):
    """Returns the largest error of a token in each array, relative to the typical token."""
    errors = []
    for a, e in zip(found, expected, strict=True):
        axes = tuple(range(2, e.ndim))
        errors.append(np.sqrt(((a - e) ** 2).sum(axes).max() / (e**2).sum(axes).mean()))
    return np.array(errors)


def assert_as_exact(functions, exact, arrays, logs):
    """Compares the errors of two implementations, XLA's and the kernels'; `logs` is the place of the logs."""
    expected, (portable, kernels) = in_float64(exact, arrays), functions
    limits = ALLOWED * measure(differentiate(portable, arrays, np.float32), expected) + 1e-6
    limits[logs + 1] += OF_LOGS
    with interpret_kernels():
        errors = measure(differentiate(kernels, arrays, np.float32), expected)
    assert (errors <= limits).all(), (errors, limits)


def attend(implementation, options, q, k, v, g, *local):
    return implementation.linear_attention(make_call(options, q, k, v, *local, log_decay_BxLxK=g)).o_BxLxHxD


@pytest.mark.parametrize('name', ATTENTION)
def test_linear_attention(name):
    options = ATTENTION[name]
    arrays = draw()[: 6 if options.local else 4]
    functions = [functools.partial(attend, each, options) for each in (xla, attention)]
    assert_as_exact(functions, functools.partial(by_definition, options), arrays, 3)


def test_parts_of_a_window():
    options = ATTENTION['features, sums alone']
    arrays = draw()[:4]
    expected = in_float64(functools.partial(by_definition, options), arrays)
    given = [*(jnp.asarray(x) for x in arrays), None, None]
    o, gradients, _ = on_parts(by_kernels(options), given, (None, None), 2)
    found = [np.asarray(x, np.float64) for x in (o, *gradients[:4])]
    errors = measure(found, expected)
    assert (errors <= [3e-6, 3e-6, 3e-6, 3e-6, OF_LOGS]).all(), errors


def test_factors_per_channel():
    """Kernels with a factor per channel add logs of one sign; they take no difference of two sums."""
    q, k, v, *_ = draw()
    logs = draw_logs(np.random.default_rng(1), (1, LENGTH, SIZE))[:, :, None]

    def fade(implementation, q, k, v, logs):
        call = make_call(Options(normalize=False), q, k, v, channel_log_decay_BxLxKxE=logs)
        return implementation.linear_attention(call).o_BxLxHxD

    functions = [functools.partial(fade, each) for each in (xla, attention)]
    assert_as_exact(functions, lambda q, k, v, logs: token_by_token(q, k, v, None, logs), (q, k, v, logs), 3)


@pytest.mark.parametrize('gate', ['head', pytest.param('channel', marks=pytest.mark.slow)])
def test_delta_rule(gate):
    rng, (q, k, v, logs, *_) = np.random.default_rng(2), draw()
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    beta = rng.uniform(0, 2, size=logs.shape).astype(np.float32)
    if gate == 'channel':
        logs = draw_logs(rng, (1, LENGTH, SIZE))[:, :, None]

    def update(implementation, q, k, v, beta, logs):
        logs = {'channel_log_decay_BxLxKxE' if gate == 'channel' else 'log_decay_BxLxK': logs}
        return implementation.delta_rule(DeltaCall(q, k, v, beta, **logs)).o_BxLxHxD

    def exact(q, k, v, beta, logs):
        return token_by_token(q, k, v, beta, logs if gate == 'channel' else logs[..., None])

    assert_as_exact([functools.partial(update, each) for each in (delta_xla, rule)], exact, (q, k, v, beta, logs), 4)


def test_only_float32_keeps_the_rest():
    g = jnp.asarray(draw_logs(np.random.default_rng(3), (1, 512, 1)))[:, :256, 0][:, None]
    exact = np.cumsum(np.maximum(np.asarray(g, np.float64), -128.0))
    c, rest = (np.asarray(x, np.float64)[0, 0] for x in block_sums(g, 256, jnp.dtype('float32')))
    assert block_sums(g, 256, jnp.dtype('bfloat16')).rest is None
    assert np.abs(c - exact).max() > 1e-4
    np.testing.assert_allclose(c + rest, exact, rtol=0, atol=1e-9)
