"""Linear attention against float64 numpy formulas: outputs, gradients, states, decoding, memory."""

import dataclasses
import functools

import definitions
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.ops.errors import OperationError
from lm.ops.linear_attention import (
    PLAIN,
    SQUARE,
    ExpKernel,
    LinearCall,
    PolynomialKernel,
    decode,
    expansion,
    linear_attention,
)
from scripts.kernels.formulations import plain_blocks

TAYLOR = (1.0, 1.0, 0.5)
# Compilation takes most of the time of these tests.
jit = functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 0})

LOCAL = ('q_local_BxLxHxC', 'k_local_BxLxKxC')


def draw(length, heads=2, kv_heads=1, features=9, values=5, compared=6, dtype=np.float32):
    """Returns features of queries and keys, values, and the inputs of the exact kernel."""
    rng = np.random.default_rng(length)
    sizes = [(heads, features), (kv_heads, features), (kv_heads, values), (heads, compared), (kv_heads, compared)]
    return [jnp.asarray(rng.normal(size=(2, length, *s)) * 0.6, dtype) for s in sizes]


def kernel(local, s):
    """Returns exact weights and their derivative."""
    s = s * local.scale
    if isinstance(local, ExpKernel):
        return np.exp(s), local.scale * np.exp(s)
    return s**local.degree, local.scale * local.degree * s ** (local.degree - 1)


def numpy_attention(x, y, v, q, k, *, powers, local=None, window=None, block=1024, denominator_bias=1.0, causal=True):
    """Computes outputs, and the gradients of Σ cos(index) · o, in float64."""
    i, j = np.arange(x.shape[1])[:, None], np.arange(x.shape[1])
    seen = j <= i if causal else np.ones((i.size, i.size), bool)
    near = seen & (j > i - window if window else i // block == j // block) if local else np.zeros_like(seen)
    far = seen & ~near
    polynomial = np.polynomial.Polynomial(powers)

    def weigh(s, t):
        exact, exact_slope = kernel(local, t) if local else (t, t)
        return polynomial(s) * far + exact * near, [polynomial.deriv()(s) * far, exact_slope * near], denominator_bias

    shape = *x.shape[:3], v.shape[3]
    do = np.cos(np.arange(np.prod(shape))).reshape(shape)
    o, dv, _, dx, dy, dq, dk = definitions.attend([(x, y), (q, k)], v, do, weigh)
    return o, dx, dy, dv, dq, dk


def call(x, y, v, q, k, **options):
    local = dict(zip(LOCAL, (q, k), strict=True)) if options.get('local') else {}
    return linear_attention(x, y, v, **local, **options)


def values_and_gradients(arrays, **options):
    @jit
    def run(*arrays):
        o, pull = jax.vjp(functools.partial(call, **options), *arrays)
        return o, *pull(jnp.cos(jnp.arange(o.size, dtype=jnp.float32)).reshape(o.shape).astype(o.dtype))

    return run(*arrays)


def check(arrays, tolerance, **options):
    plain = {name: value for name, value in options.items() if name != 'implementation'}
    expected = numpy_attention(*arrays, **plain)
    for name, got, e in zip(
        ('o', 'dx', 'dy', 'dv', 'dq', 'dk'), values_and_gradients(arrays, **options), expected, strict=True
    ):
        got = np.asarray(got, np.float64)
        assert np.isfinite(got).all(), name
        error = np.linalg.norm(got - e) / max(np.linalg.norm(e), 1e-3)
        assert error <= tolerance, f'{name}: {error:.2e}'


@pytest.mark.parametrize('implementation', ['xla', 'reference'])
@pytest.mark.parametrize(
    ('length', 'options'),
    [
        (1, dict(powers=SQUARE, local=PolynomialKernel(4))),
        (7, dict(powers=TAYLOR, block=3)),
        (100, dict(powers=SQUARE, block=32)),
        (100, dict(powers=SQUARE, local=PolynomialKernel(4), block=32)),
        (256, dict(powers=SQUARE, local=PolynomialKernel(2, 0.5), block=64)),
        (300, dict(powers=PLAIN, block=128, denominator_bias=200.0)),
        (45, dict(powers=(0.7, 0.0, 0.5, 0.2), block=16, denominator_bias=80.0)),
        (45, dict(powers=TAYLOR, local=ExpKernel(0.5), block=16)),
        (45, dict(powers=TAYLOR, local=ExpKernel(0.5), window=7, block=16, denominator_bias=0.0)),
        (45, dict(powers=TAYLOR, local=PolynomialKernel(2), window=21, block=16)),
        (45, dict(powers=SQUARE, causal=False, block=16)),
    ],
    ids=str,
)
def test_agrees_with_float64(length, options, implementation):
    check(draw(length), 1e-5, implementation=implementation, **options)


@pytest.mark.parametrize(
    'options',
    [
        dict(powers=SQUARE, local=PolynomialKernel(4), block=32),
        dict(powers=TAYLOR, local=ExpKernel(0.5), window=21, block=32),
    ],
    ids=str,
)
def test_bfloat16_stays_close(options):
    check(draw(100, dtype=jnp.bfloat16), 2e-2, **options)


def test_heads_share_the_sums_of_their_key_head():
    check(draw(50, heads=6, kv_heads=3, features=17), 1e-5, powers=SQUARE, block=16)


def test_result_does_not_depend_on_the_block_without_local():
    arrays = draw(100)
    results = [jit(functools.partial(call, powers=TAYLOR, block=block))(*arrays) for block in (1, 17, 100, None)]
    for other in results[1:]:
        np.testing.assert_allclose(other, results[0], rtol=1e-5, atol=1e-6)


def test_no_token_changes_an_earlier_output():
    for options in (dict(powers=SQUARE, local=PolynomialKernel(4)), dict(powers=TAYLOR, local=ExpKernel(), window=9)):
        arrays = draw(50)
        run = jit(functools.partial(call, block=16, **options))
        before, after = run(*arrays), run(*(a.at[:, 20].set(9.0) for a in arrays))
        np.testing.assert_array_equal(before[:, :20], after[:, :20])
        assert jnp.abs(before[:, 20:] - after[:, 20:]).max() > 1e-3


def features(matrix, x, queries):
    return jnp.abs(x @ matrix) + 0.1


@dataclasses.dataclass(frozen=True)
class DividedFeatures:
    """|x W| + 0.1; with `rescale` features of queries are divided by their largest one, which has no gradient."""

    rescale: bool

    def __call__(self, matrix, x, queries):
        y = features(matrix, x, queries)
        return y / jax.lax.stop_gradient(y.max(-1, keepdims=True)) if queries and self.rescale else y

    def log_factor(self, matrix, x):
        return jax.lax.stop_gradient(jnp.log(features(matrix, x, True).max(-1)))


@pytest.mark.parametrize(
    'options',
    [
        dict(local=ExpKernel(0.5, relative=True), window=5, denominator_bias=0.0),
        dict(local=ExpKernel(0.5), window=5, denominator_bias=0.3),
        dict(local=ExpKernel(0.5), denominator_bias=0.0),
    ],
    ids=str,
)
def test_factors_that_queries_lack_are_put_back_beside_exact_weights(options):
    arrays, matrix = draw(21), jnp.asarray(np.random.default_rng(0).normal(size=(9, 12)), jnp.float32)
    options = options | dict(block=8, q_parameters=matrix, k_parameters=matrix)

    def compute(rescale, implementation):
        return values_and_gradients(
            arrays, feature_map=DividedFeatures(rescale), implementation=implementation, **options
        )

    expected = compute(False, 'reference')
    for implementation in ('reference', 'xla'):
        for got, want in zip(compute(True, implementation), expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize('options', [dict(), dict(local=PolynomialKernel(2), denominator_bias=0.0)], ids=str)
def test_factors_that_queries_lack_are_not_lost_beside_other_terms(options):
    matrix = jnp.ones((9, 12))
    with pytest.raises(OperationError, match='feature_map: leaves factors out of queries'):
        call(*draw(5), feature_map=DividedFeatures(True), q_parameters=matrix, k_parameters=matrix, **options)


def test_gradients_flow_through_a_feature_map_inside_the_operation():
    x, y, v, *_ = draw(45)
    matrices = jnp.asarray(np.random.default_rng(0).normal(size=(2, 9, 12)), jnp.float32)

    def inside(x, y, v, matrices):
        o = linear_attention(
            x, y, v, feature_map=features, q_parameters=matrices[0], k_parameters=matrices[1], block=16
        )
        return jnp.sin(o).sum()

    def outside(x, y, v, matrices):
        o = linear_attention(
            features(matrices[0], x, True), features(matrices[1], y, False), v, implementation='reference'
        )
        return jnp.sin(o).sum()

    got, expected = (jit(jax.grad(f, (0, 1, 2, 3)))(x, y, v, matrices) for f in (inside, outside))
    for g, e in zip(got, expected, strict=True):
        np.testing.assert_allclose(g, e, rtol=1e-4, atol=1e-5)


def test_state_carries_over():
    x, y, v, *_ = draw(50)

    def tail(x, y, v):
        _, state = linear_attention(x[:, :25], y[:, :25], v[:, :25], powers=TAYLOR, block=16, return_state=True)
        return linear_attention(x[:, 25:], y[:, 25:], v[:, 25:], powers=TAYLOR, block=16, initial_state=state)

    def whole(x, y, v):
        return linear_attention(x, y, v, powers=TAYLOR, implementation='reference')[:, 25:]

    @functools.partial(jit, static_argnums=0)
    def run(function, *arrays):
        o, pull = jax.vjp(function, *arrays)
        return o, *pull(jnp.cos(o))

    for got, expected in zip(run(tail, x, y, v), run(whole, x, y, v), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    'options',
    [
        dict(powers=SQUARE),
        dict(powers=SQUARE, local=PolynomialKernel(4), block=8),
        dict(powers=TAYLOR, local=ExpKernel(0.5), block=8, denominator_bias=0.0),
        dict(powers=TAYLOR, local=ExpKernel(0.5), window=7, denominator_bias=0.0),
    ],
    ids=str,
)
def test_decoding_equals_the_parallel_form(options):
    arrays = draw(30)
    expected = jit(functools.partial(call, **options))(*arrays)

    def arguments(part):
        x, y, v, q, k = (a[:, part] for a in arrays)
        local = dict(zip(LOCAL, (q, k), strict=True)) if 'local' in options else {}
        return dict(q_BxLxHxE=x, k_BxLxKxE=y, v_BxLxKxD=v, **local)

    step = jit(lambda state, arrays: decode.decode_step(state, LinearCall.from_arguments(arrays | options)))
    for cuts in (range(31), (0, 30), (0, 14, 15, 29, 30)):
        state, outputs = decode.init_state(LinearCall.from_arguments(arguments(slice(0, 1)) | options)), []
        size = sum(x.nbytes for x in jax.tree.leaves(state))
        for part in map(slice, cuts, cuts[1:]):
            state, o = step(state, arguments(part))
            outputs.append(o)
        np.testing.assert_allclose(jnp.concatenate(outputs, 1), expected, rtol=1e-5, atol=1e-5)
        assert sum(x.nbytes for x in jax.tree.leaves(state)) == size


def test_very_negative_scores_do_not_vanish():
    x, y, v, q, k = draw(40)
    q, k = 30 * jnp.abs(q), -30 * jnp.abs(k)
    options = dict(powers=TAYLOR, local=ExpKernel(), denominator_bias=0.0, q_local_BxLxHxC=q, k_local_BxLxKxC=k)
    o = jit(functools.partial(linear_attention, window=64, **options))(x, y, v)
    assert jnp.isfinite(o).all()
    np.testing.assert_allclose(o[:, 0, 0], v[:, 0, 0], rtol=1e-5)


@pytest.mark.parametrize('size', [1, 5, 8, 20, 72])
def test_packing(size):
    rng = np.random.default_rng(size)
    x, y = (jnp.asarray(rng.normal(size=(1, 1, size, 3)), jnp.float32) for _ in range(2))
    for powers in (SQUARE, (0.3, 0.5, 0.7)):
        weights = expansion.weights(powers, size)

        @jax.jit
        def value(x, y, powers=powers, weights=weights):
            (phi, x), (psi, _) = (expansion.expand(powers, z) for z in (x, y))
            return sum((a * b * w[:, None]).sum(2) for a, b, w in zip(phi, psi, weights, strict=True)) + jnp.sin(x).sum(
                2
            )

        @jax.jit
        def direct(x, y, powers=powers):
            s = (x * y).sum(2)
            return sum(c * s**n for n, c in enumerate(powers)) + jnp.sin(x).sum(2)

        np.testing.assert_allclose(value(x, y), direct(x, y), rtol=1e-4, atol=1e-4)
        got, expected = (jax.jit(jax.grad(lambda x, f=f: f(x, y).sum()))(x) for f in (value, direct))
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
    assert [sum(map(len, expansion.weights(SQUARE, n))) for n in (32, 64)] == [640, 2304]


def memory(length, heads, r, block=1024):
    """Returns (temporary bytes, bytes of inputs, outputs and gradients) of forward plus backward."""
    shapes = [(r, heads), (r, heads), (64, heads), (64, heads), (64, heads)]
    arrays = [jax.ShapeDtypeStruct((1, length, h, size), jnp.float32) for size, h in shapes]

    def run(x, y, v, q, k, do):
        o, pull = jax.vjp(functools.partial(call, powers=SQUARE, local=PolynomialKernel(4), block=block), x, y, v, q, k)
        return o, pull(do)

    analysis = jax.jit(run).lower(*arrays, arrays[2]).compile().memory_analysis()
    return analysis.temp_size_in_bytes, analysis.argument_size_in_bytes + analysis.output_size_in_bytes


def test_memory_is_linear():
    temporary, visible = memory(32_768, 1, 32)
    one_block = 4 * (640 * 1024 + 1024 * 1024) * 2
    assert temporary <= 3 * visible + one_block
    # The program stores neither features nor sums of every block: those alone would take 84 and 40 MB.
    shorter, _ = memory(16_384, 1, 32)
    assert temporary - shorter <= 16_384 * 4 * 1_000


def test_plain_formulation_agrees():
    x, y, v, q, k = draw(64, heads=2, kv_heads=2)
    expected = call(x, y, v, q, k, powers=SQUARE, local=PolynomialKernel(4), block=16)
    got = plain_blocks(x, y, v, q, k, degree=4, block=16)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (dict(window=3), 'window = 3'),
        (dict(powers=(0.0,)), 'powers'),
        (dict(block=0), 'block = 0'),
        (dict(local=PolynomialKernel(4)), 'q_local'),
        (dict(implementation='nothing'), 'nothing'),
    ],
)
def test_wrong_options_are_refused(change, message):
    x, y, v, *_ = draw(8)
    with pytest.raises(OperationError, match=message):
        linear_attention(x, y, v, **change)
