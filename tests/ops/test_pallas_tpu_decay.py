"""The TPU kernels of linear attention with decay, and without denominators, interpreted on the CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import interpret_kernels
from test_pallas_tpu import make_call

from lm.ops.linear_attention import PLAIN, SQUARE, xla
from lm.ops.linear_attention.tpu import attention as pallas_tpu
from lm.ops.linear_attention.types import Options, PolynomialKernel
from lm.ops.tpu import by_token

pytestmark = pytest.mark.usefixtures('no_races')
TAYLOR = (1.0, 1.0, 0.5)
NAMES = ('o', 'dq', 'dk', 'dv', 'dg', 'dq_local', 'dk_local')

CASES = {
    'exact blocks': (300, Options(SQUARE, local=PolynomialKernel(4), block=128)),
    'one exact block': (100, Options(SQUARE, local=PolynomialKernel(2, 0.5), block=128)),
    'self products': (300, Options(SQUARE)),
    'self products, sums alone': (300, Options(SQUARE, normalize=False)),
    'series': (300, Options(TAYLOR, denominator_bias=0.0)),
    'features': (300, Options(PLAIN, denominator_bias=4.0)),
    'features, sums alone': (300, Options(PLAIN, normalize=False)),
}


def draw(length, dtype):
    """Returns q, k, v, log factors with resets, q_local, k_local; the features keep denominators away from 0."""
    rng = np.random.default_rng(length)
    shapes = [(4, 16), (2, 16), (2, 32), (4, 32), (2, 32)]
    q, k, v, *local = (0.4 * rng.normal(size=(1, length, *shape)) for shape in shapes)
    arrays = [jnp.asarray(a, dtype) for a in (np.abs(q), np.abs(k), v, *local)]
    g = -rng.exponential(size=(1, length, 2)) * rng.choice([1e-3, 0.1, 3.0], size=(1, length, 2))
    g[:, [0, 40, 41, length // 2, length - 1]] = -np.inf
    return [*arrays[:3], jnp.asarray(g, jnp.float32), *arrays[3:]]


@functools.cache
def program(implementation, options):
    def function(q, k, v, g, *local):
        return implementation.linear_attention(make_call(options, q, k, v, *local, log_decay_BxLxK=g)).o_BxLxHxD

    @jax.jit
    def both(*arrays):
        o, pull = jax.vjp(function, *arrays)
        return o, *pull(jnp.cos(jnp.arange(o.size)).reshape(o.shape).astype(o.dtype))

    return both


def run(implementation, options, arrays):
    return program(implementation, options)(*(arrays if options.local else arrays[:4]))


@pytest.mark.parametrize('name', CASES)
@pytest.mark.parametrize(('dtype', 'tolerance'), [(jnp.float32, 1e-4), (jnp.bfloat16, 3e-2)], ids=['f32', 'bf16'])
def test_kernels_agree_with_xla(name, dtype, tolerance):
    length, options = CASES[name]
    if dtype == jnp.bfloat16 and options.block is None and options.powers != SQUARE:
        pytest.skip('the same code; two cases of bfloat16 are enough')
    arrays = draw(length, dtype)
    expected = run(xla, options, [a.astype(jnp.float32) for a in arrays])
    with interpret_kernels():
        got = run(pallas_tpu, options, arrays)
    for label, a, e in zip(NAMES, got, expected, strict=False):
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        assert np.isfinite(a).all(), label
        # The gradients of factors are differences of rounded sums: in bfloat16 they lose one more digit.
        allowed = tolerance * (2 if label == 'dg' else 1)
        assert np.linalg.norm(a - e) <= allowed * max(np.linalg.norm(e), 1e-3), label
    assert not np.asarray(got[4][:, [0, 40, 41, length // 2]]).any()


@pytest.mark.parametrize('gates', [[0.0], [-1e-8], [-104.0], [-1e4], [0.0, -1e-8, -104.0, -1e4]], ids=str)
@pytest.mark.parametrize('name', ['exact blocks', 'features, sums alone'])
def test_gates_of_any_size(name, gates):
    """−104 is the last log whose factor is not a reset: as a sum of many, c reaches −1e4 and loses digits."""
    length, options = CASES[name]
    arrays = draw(length, jnp.float32)
    arrays[3] = jnp.asarray(np.random.default_rng(1).choice(gates, size=arrays[3].shape), jnp.float32)
    expected = run(xla, options, arrays)
    with interpret_kernels():
        got = run(pallas_tpu, options, arrays)
    # The gradient of a factor that forgets all is the rounding error of sums as large as the gradients of the values.
    least = 0.1 * np.linalg.norm(expected[3])
    for label, a, e in zip(NAMES, got, expected, strict=False):
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        assert np.isfinite(a).all(), label
        assert np.linalg.norm(a - e) <= 1e-4 * max(np.linalg.norm(e), least), label


def test_nothing_crosses_a_reset():
    length, options = CASES['exact blocks']
    arrays = draw(length, jnp.float32)
    wild = [a.at[:, : length // 2].set(30.0) if a is not arrays[3] else a for a in arrays]
    with interpret_kernels():
        one, other = (run(pallas_tpu, options, each)[0] for each in (arrays, wild))
    np.testing.assert_array_equal(one[:, length // 2 :], other[:, length // 2 :])


@pytest.mark.parametrize('name', ['exact blocks', 'features'])
def test_gradients_of_running_sums_keep_the_block_and_later_blocks_apart(name):
    """A factor's gradient from later blocks is not computed as a sum over all later tokens: in bfloat16, rounding
    errors would exceed it in long windows."""
    length, options = CASES[name]
    q, k, v, g, *local = draw(length, jnp.float32)
    arrays = [q, k, v, jnp.zeros_like(g), *(local if options.local else [])]
    call = make_call(options, *arrays[:3], *arrays[4:], log_decay_BxLxK=arrays[3])
    plan, inputs, maps = pallas_tpu.arrange(call, part=False)
    do = jnp.cos(jnp.arange(4 * 32 * length)).reshape(1, length, 4, 32)

    def gradient(c):
        o, pull = jax.vjp(lambda c: pallas_tpu.attend(plan, inputs._replace(c_Nx1xL=c), maps), c)
        return pull(by_token(do, o.shape[2], 4))[0]

    with interpret_kernels():
        dc = jax.jit(gradient, compiler_options={'xla_backend_optimization_level': 0})(inputs.c_Nx1xL)
    expected = run(xla, options, arrays)[4]
    ends = np.arange(plan.block - 1, length, plan.block)
    found = np.asarray(dc).reshape(2, 2, -1)[..., ends].sum(1)
    np.testing.assert_allclose(found, np.asarray(expected)[0, ends].T, rtol=1e-3, atol=1e-3)
