"""Linear attention with decay against a recurrence over tokens in float64: outputs, gradients, resets, decoding."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from lm.ops.errors import OperationError
from lm.ops.linear_attention import (
    PLAIN,
    SQUARE,
    ExpKernel,
    LinearCall,
    Options,
    PolynomialKernel,
    decay_state,
    decode,
    linear_attention,
)

TAYLOR = (1.0, 1.0, 0.5)
jit = functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 0})
LOCAL = ('q_local_BxLxHxC', 'k_local_BxLxKxC')


def absolute(parameters, x, queries):
    return jnp.abs(x @ parameters) + 0.1


MATRIX = np.random.default_rng(4).normal(size=(6, 7)).astype(np.float32)
MAPPED = dict(feature_map=absolute, q_parameters=MATRIX, k_parameters=MATRIX)

CASES = {
    'features': (33, dict(block=8)),
    'sums alone': (33, dict(block=8, normalize=False)),
    'self products': (33, dict(powers=SQUARE, block=16)),
    'series': (20, dict(powers=TAYLOR, block=7, denominator_bias=9.0)),
    'cubes': (20, dict(powers=(0.7, 0.0, 0.5, 0.2), block=8, denominator_bias=20.0)),
    'feature map': (20, dict(**MAPPED, block=8)),
    'exact blocks': (37, dict(powers=SQUARE, local=PolynomialKernel(4), block=16)),
    'one exact block': (9, dict(powers=SQUARE, local=PolynomialKernel(2, 0.5), block=16)),
    'exponential blocks': (20, dict(powers=TAYLOR, local=ExpKernel(0.5), block=8, denominator_bias=0.0)),
    'window': (33, dict(powers=TAYLOR, local=ExpKernel(0.5), window=5, block=8, denominator_bias=0.0)),
    'polynomial window': (20, dict(powers=TAYLOR, local=PolynomialKernel(2), window=11, block=8)),
}


COMBINED = ('series', 'polynomial window')
"""The cases whose parts other cases have in other combinations."""


def draw(length, heads=4, kv_heads=2, dtype=jnp.float32):
    rng = np.random.default_rng(length)
    sizes = [(heads, 6), (kv_heads, 6), (kv_heads, 5), (heads, 3), (kv_heads, 3)]
    return [jnp.asarray(rng.normal(size=(2, length, *size)) * 0.6, dtype) for size in sizes]


def draw_decay(length, kv_heads=2, resets=()):
    rng = np.random.default_rng(length + 1)
    g = -rng.exponential(size=(2, length, kv_heads)).astype(np.float32)
    g[:, list(resets)] = -np.inf
    return g


def call(x, y, v, q, k, g, **options):
    local = dict(zip(LOCAL, (q, k), strict=True)) if options.get('local') else {}
    return linear_attention(x, y, v, log_decay_BxLxK=g, **local, **options)


def weigh(options, x, y, q, k):
    """Returns weights [B, K, G, L, L] without decay, by the formulas."""
    length, groups = x.shape[1], x.shape[2] // y.shape[2]
    pair = lambda a, b: jnp.einsum('blkgf,bmkf->bkglm', a.reshape(*b.shape[:3], groups, -1), b)  # noqa: E731
    x, y = options.compute_features(MATRIX, x, True), options.compute_features(MATRIX, y, False)
    w = sum(c * pair(x, y) ** n for n, c in enumerate(options.powers))
    if options.local is None:
        return w
    i, j = np.arange(length)[:, None], np.arange(length)
    near = j > i - options.window if options.window else i // options.block == j // options.block
    s = pair(q, k) * options.local.scale
    exact = jnp.exp(s) if isinstance(options.local, ExpKernel) else s**options.local.degree
    return jnp.where(near, exact, w)


def recurrence(x, y, v, q, k, g, **options):
    """Computes token by token: the token's factor multiplies all weights of earlier keys, and its own key
    joins at 1."""
    options = Options(**{name: value for name, value in options.items() if 'parameters' not in name})
    w_BxKxGxLxM = weigh(options, x, y, q, k)
    index = jnp.arange(v.shape[1])

    def step(factors_BxKxM, i):
        factors_BxKxM = (factors_BxKxM * jnp.exp(g[:, i])[..., None]).at[..., i].set(1.0)
        w_BxKxGxM = jnp.where(index <= i, w_BxKxGxLxM[..., i, :], 0.0) * factors_BxKxM[:, :, None]
        o_BxKxGxD = jnp.einsum('bkgm,bmkd->bkgd', w_BxKxGxM, v)
        total = options.denominator_bias + w_BxKxGxM.sum(-1, keepdims=True)
        return factors_BxKxM, o_BxKxGxD / total if options.normalize else o_BxKxGxD

    batch, length, heads, _ = v.shape
    _, o_LxBxKxGxD = jax.lax.scan(step, jnp.zeros((batch, heads, length), v.dtype), index)
    return o_LxBxKxGxD.swapaxes(0, 1).reshape(batch, length, -1, v.shape[-1])


def with_gradients(function):
    """Returns outputs, and gradients of the outputs of the tokens that count."""

    @jit
    def run(counts_L, *arrays):
        o, pull = jax.vjp(function, *arrays)
        do = jnp.cos(jnp.arange(o.size)).reshape(o.shape) * counts_L[:, None, None]
        return o, *pull(do.astype(o.dtype))

    return run


@functools.cache
def program(name, implementation):
    return with_gradients(functools.partial(call, **CASES[name][1], implementation=implementation))


@functools.cache
def recurrence_program(name):
    return with_gradients(functools.partial(recurrence, **CASES[name][1]))


def recurrent(name, arrays):
    """Computes outputs and gradients of the recurrence in float64."""
    with jax.enable_x64(True):
        arrays = (np.asarray(a, np.float64) for a in arrays)
        found = recurrence_program(name)(np.ones(CASES[name][0], bool), *arrays)
        return [np.asarray(a) for a in found]


def check(name, implementation, arrays, tolerance=2e-5):
    expected = recurrent(name, arrays)
    got = program(name, implementation)(np.ones(CASES[name][0], bool), *arrays)
    for label, a, e in zip(('o', 'dx', 'dy', 'dv', 'dq', 'dk', 'dg'), got, expected, strict=True):
        a = np.asarray(a, np.float64)
        assert np.isfinite(a).all(), label
        error = np.linalg.norm(a - e) / max(np.linalg.norm(e), 1e-3)
        assert error <= tolerance, f'{label}: {error:.2e}'
    return got


@pytest.mark.parametrize(
    ('name', 'implementation'),
    [pytest.param(name, 'xla', marks=pytest.mark.slow if name in COMBINED else ()) for name in CASES]
    + [(name, 'reference') for name in ('sums alone', 'exact blocks', 'window')],
)
def test_agrees_with_the_recurrence(name, implementation):
    length = CASES[name][0]
    for resets in ((), (0, length // 3, length // 2)):
        *_, dg = check(name, implementation, (*draw(length), draw_decay(length, resets=resets)))
        assert not np.asarray(dg[:, list(resets)]).any()


FACTORS = st.sampled_from([0.0, -1e-30, -1e-4, -0.5, -20.0, -60.0, -103.0, -200.0, -1e30, -np.inf])


@pytest.mark.parametrize('name', ['self products', 'exact blocks', 'window'])
@hypothesis.given(st.data())
@hypothesis.settings(max_examples=20, derandomize=True)
def test_any_factors(name, data):
    length = CASES[name][0]
    g = data.draw(st.lists(FACTORS, min_size=2 * length * 2, max_size=2 * length * 2))
    check(name, 'xla', (*draw(length), np.float32(g).reshape(2, length, 2)))


@pytest.mark.parametrize('name', ['self products', 'window', 'exponential blocks', 'exact blocks'])
def test_a_reset_hides_all_earlier_tokens(name):
    """Outputs after the reset equal outputs of these tokens alone, and gradients do not cross it: exactly 0."""
    length, _ = CASES[name]
    # Exact blocks are cut from the beginning of the sequence, so a document keeps its weights only from a block's start
    # on.
    at = 16 if 'blocks' in name else 13
    arrays = (*draw(length), draw_decay(length, resets=[at]))
    run = program(name, 'xla')
    counted = np.arange(length) >= at
    (o, *after), (_, *before) = run(counted, *arrays), run(~counted, *arrays)
    # In the second case the tokens come first, so that they cannot see the others.
    alone = run(counted, *(np.roll(a, -at, axis=1) for a in arrays))[0][:, : length - at]
    np.testing.assert_allclose(o[:, at:], alone, rtol=0, atol=1e-6 * np.abs(alone).max())
    wild = [a.at[:, :at].set(1e4) for a in map(jnp.asarray, arrays[:5])]
    np.testing.assert_array_equal(run(counted, *wild, arrays[5])[0][:, at:], o[:, at:])
    for label, a, b in zip('xyvqkg', after, before, strict=True):
        assert not np.asarray(a[:, :at]).any(), label
        assert not np.asarray(b[:, at:]).any(), label
        assert np.isfinite(a).all(), label
        assert np.isfinite(b).all(), label


def test_bfloat16_stays_close():
    for name in ('exact blocks', 'window'):
        length, options = CASES[name]
        arrays = (*draw(length, dtype=jnp.bfloat16), draw_decay(length, resets=[9]))
        expected, *_ = recurrent(name, arrays)
        got = jit(functools.partial(call, **options))(*arrays)
        assert got.dtype == jnp.bfloat16
        assert np.linalg.norm(np.asarray(got, np.float64) - expected) < 2e-2 * np.linalg.norm(expected)


long = jit(functools.partial(linear_attention, powers=TAYLOR, block=512))


@pytest.mark.parametrize(('factor', 'tolerance'), [(-50.0, 1e-5), (-0.7, 1e-5), (-1e-7, 1e-5)])
def test_long_sequences_keep_their_precision(factor, tolerance):
    """Running sums reach -100,000 here, where float32 numbers are 0.008 apart; then the factors become mild."""
    length = 2000
    x, y, v, *_ = (a[:1, :, :1] for a in draw(length, 1, 1))
    g = np.full((1, length, 1), factor, np.float32)
    g[:, -100:] = -0.01 * np.arange(100)[:, None]
    o = long(x, y, v, log_decay_BxLxK=g)
    total = np.cumsum(g[0, :, 0].astype(np.float64))
    s = np.float64(x[0, :, 0]) @ np.float64(y[0, :, 0]).T
    w = np.tril(1 + s + s**2 / 2) * np.exp(np.minimum(total[:, None] - total, 0))
    expected = w @ np.float64(v[0, :, 0]) / (1 + w.sum(1, keepdims=True))
    np.testing.assert_allclose(o[0, :, 0], expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize('name', ['self products', 'sums alone', 'exact blocks', 'exponential blocks', 'window'])
def test_decoding_equals_the_parallel_form(name):
    length, options = CASES[name]
    arrays = (*draw(length), jnp.asarray(draw_decay(length, resets=[11, 18])))
    expected = jit(functools.partial(call, **options))(*arrays)

    def arguments(part):
        x, y, v, q, k, g = (a[:, part] for a in arrays)
        local = dict(zip(LOCAL, (q, k), strict=True)) if 'local' in options else {}
        return dict(q_BxLxHxE=x, k_BxLxKxE=y, v_BxLxKxD=v, log_decay_BxLxK=g, **local)

    step = jit(lambda state, arrays: decode.decode_step(state, LinearCall.from_arguments(arrays | options)))
    n = length // 2 - 1  # no end of a block, and a size that is compiled once
    for cuts in (range(length + 1), (0, length), (0, n, n + 1, *range(2 * n + 1, length + 1))):
        state, outputs = decode.init_state(LinearCall.from_arguments(arguments(slice(0, 1)) | options)), []
        for part in map(slice, cuts, cuts[1:]):
            state, o = step(state, arguments(part))
            outputs.append(o)
        np.testing.assert_allclose(jnp.concatenate(outputs, 1), expected, rtol=0, atol=1e-5)


@functools.cache
def segments(implementation):
    """Returns programs for the results and gradients of two segments, and of the whole."""
    attend = functools.partial(linear_attention, powers=TAYLOR, block=8, implementation=implementation)

    def whole(x, y, v, g):
        return attend(x, y, v, log_decay_BxLxK=g, return_state=True)

    def parts(x, y, v, g):
        first, last = ([a[:, part] for a in (x, y, v)] for part in (slice(17), slice(17, None)))
        head, state = attend(*first, log_decay_BxLxK=g[:, :17], return_state=True)
        tail, handed = attend(*last, log_decay_BxLxK=g[:, 17:], return_state=True, initial_state=state)
        _, alone = attend(*last, log_decay_BxLxK=g[:, 17:], return_state=True)
        added = jax.tree.map(jnp.add, decay_state(state, g[:, 17:].sum(1)), alone)
        return jnp.concatenate([head, tail], 1), jax.tree.map(lambda a, b: (a + b) / 2, handed, added)

    def both(function, *arrays):
        result, pull = jax.vjp(function, *arrays)
        return jax.tree.leaves((result, pull(jax.tree.map(jnp.cos, result))))

    return [jit(functools.partial(both, function)) for function in (parts, whole)]


@pytest.mark.parametrize(
    ('implementation', 'resets'), [('xla', ()), ('xla', (11,)), ('xla', (30,)), ('reference', (11,))]
)
def test_segments_compose(implementation, resets):
    """Sums pass from one call to the next, or are added afterwards. Outputs, sums and gradients equal the whole."""
    x, y, v, *_ = draw(36)
    g = jnp.asarray(draw_decay(36, resets=resets))
    for got, expected in zip(*(run(x, y, v, g) for run in segments(implementation)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * max(1, np.abs(expected).max()))


@pytest.mark.slow
def test_state_after_a_window():
    x, y, v, q, k = draw(20)
    g = jnp.asarray(draw_decay(20, resets=[3]))
    options = dict(powers=TAYLOR, return_state=True, block=8)

    def windowed(g):
        local = dict(local=ExpKernel(), window=6, q_local_BxLxHxC=q, k_local_BxLxKxC=k)
        return linear_attention(x, y, v, log_decay_BxLxK=g, **local, **options)[1]

    def plain(g):
        return linear_attention(x, y, v, log_decay_BxLxK=g, implementation='reference', **options)[1].totals

    def run(function):
        state, pull = jax.vjp(function, g)
        return state, *pull(jax.tree.map(jnp.cos, state))

    (got, dg), (expected, dexpected) = run(lambda g: windowed(g).totals), run(plain)
    for a, e in zip((*got, dg), (*expected, dexpected), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (dict(log_decay_BxLxK=jnp.zeros((2, 8, 4))), 'log_decay of shape'),
        (dict(log_decay_BxLxK=jnp.zeros((2, 8, 2)), causal=False), 'causal = False'),
        (dict(log_decay_BxLxK=jnp.zeros((2, 8, 2)), implementation='pallas_tpu'), 'pallas_tpu'),
    ],
)
def test_wrong_options_are_refused(change, message):
    x, y, v, *_ = draw(8)
    with pytest.raises(OperationError, match=message):
        linear_attention(x, y, v, **{'powers': PLAIN, **change})
