"""Exact attention against float64 numpy formulas: outputs, gradients, masks, memory."""

import functools
import importlib.util
import types

import definitions
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.hardware import LIBTPU_ENVIRONMENT, describe_devices, parse
from lm.ops import exact_attention, platform, sequence
from lm.ops.errors import OperationError
from lm.ops.exact_attention import SoftmaxCall
from lm.ops.exact_attention.tpu import splash as pallas_tpu

SIZE = 16


def draw(batch, length, heads, kv_heads, keys=None, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    keys = length if keys is None else keys
    shapes = [(batch, length, heads, SIZE), (batch, keys, kv_heads, SIZE), (batch, keys, kv_heads, SIZE)]
    return [jnp.asarray(rng.normal(size=s), dtype) for s in shapes]


def mask(length, keys, causal=True, window=None):
    i, j = np.arange(length)[:, None], np.arange(keys)
    seen = np.ones((length, keys), bool)
    if causal:
        seen &= j <= i
    if window:
        seen &= i - j < window
    return seen


def numpy_attention(q, k, v, seen, kernel, do=None):
    """Computes outputs, and the gradients for the cotangent `do`, in float64; without `do` it is cos(index).

    `seen` is [L, M], or [B, L, M] if it differs between rows of the batch. kernel(s) returns the unnormalised weights,
    their derivative and the bias of the denominator.
    """
    seen = seen if np.ndim(seen) < 3 else seen[:, None]

    def weigh(s):
        w, slope, bias = kernel(s)
        return w * seen, [slope * seen], bias

    do = np.cos(np.arange(q.size)).reshape(q.shape) if do is None else do
    o, dv, _, dq, dk = definitions.attend([(q, k)], v, do, weigh)
    return o, dq, dk, dv


def exponential(scale):
    def kernel(s):
        w = np.exp(s * scale)
        return w, w * scale, 0.0

    return kernel


def power(degree, bias, scale):
    def kernel(s):
        return (s * scale) ** degree, degree * scale * (s * scale) ** (degree - 1), bias

    return kernel


@functools.partial(jax.jit, static_argnums=0)
def values_and_gradients(attention, q, k, v, **others):
    o, pull = jax.vjp(functools.partial(attention, **others), q, k, v)
    return o, *pull(jnp.cos(jnp.arange(q.size, dtype=jnp.float32)).reshape(q.shape).astype(o.dtype))


def softmax_by(function, **options):
    """Returns `function` of a call as a function of its arrays."""
    return lambda q, k, v: function(SoftmaxCall(q, k, v, **options))


def assert_close(got, expected, tolerance):
    for name, g, e in zip(('o', 'dq', 'dk', 'dv'), got, expected, strict=True):
        g = np.asarray(g, np.float64)
        assert np.isfinite(g).all()
        error = np.abs(g - e).max() / max(np.abs(e).max(), 0.1)  # the gradient of the only visible key is zero
        assert error <= tolerance, f'{name}: {error:.2e}'


@pytest.mark.parametrize('implementation', ['xla', 'reference'])
@pytest.mark.parametrize(
    ('length', 'heads', 'kv_heads', 'block', 'window'),
    [
        (1, 2, 2, None, None),
        (7, 2, 1, None, 3),
        (64, 2, 2, 16, None),
        (64, 4, 2, 16, 1),
        (100, 4, 2, 32, None),
        (100, 1, 1, 24, 40),
        (129, 3, 1, 64, None),
        (129, 2, 2, 17, 17),
        (129, 2, 2, None, 500),
    ],
)
def test_softmax_agrees_with_float64(length, heads, kv_heads, block, window, implementation):
    q, k, v = draw(2, length, heads, kv_heads)
    attention = functools.partial(
        exact_attention.softmax_attention, window=window, block=block, implementation=implementation
    )
    expected = numpy_attention(q, k, v, mask(length, length, window=window), exponential(SIZE**-0.5))
    assert_close(values_and_gradients(attention, q, k, v), expected, 1e-5)


@pytest.mark.parametrize('implementation', ['xla', 'reference'])
@pytest.mark.parametrize(('block', 'window', 'cap'), [(None, None, None), (32, 40, 0.7), (24, None, 0.7)])
def test_sinks_and_caps_agree_with_float64(block, window, cap, implementation):
    q, k, v = draw(2, 100, 4, 2)
    sinks = np.array([-2.0, 0.5, 3.0, 40.0])
    found, scale = [], SIZE**-0.5

    def attention(q, k, v, sinks_H):
        options = dict(window=window, block=block, score_cap=cap, implementation=implementation)
        return exact_attention.softmax_attention(q, k, v, sinks_H=sinks_H, **options)

    o, pull = jax.jit(lambda *arrays: jax.vjp(attention, *arrays))(q, k, v, jnp.asarray(sinks, jnp.float32))
    do = np.cos(np.arange(q.size)).reshape(q.shape)
    found = [o, *pull(jnp.asarray(do, jnp.float32))]

    bias, seen = np.exp(sinks)[:, None, None], mask(100, 100, window=window)

    def weigh(s):
        bent = 1.0 if cap is None else 1.0 - np.tanh(s * scale / cap) ** 2
        w = seen * np.exp(s * scale if cap is None else cap * np.tanh(s * scale / cap))
        return w, [w * scale * bent], bias

    o, dv, dbias, dq, dk = definitions.attend([(q, k)], v, do, weigh)
    assert_close(found[:4], (o, dq, dk, dv), 1e-5)
    dsinks = (dbias * bias).sum((0, 2, 3))
    np.testing.assert_allclose(found[4], dsinks, atol=1e-5 * np.abs(dsinks).max())


def test_gradients_of_sinks_keep_precision_in_bfloat16():
    """All weights are equal and all gradients too, so that a sum of rounded terms would drift (jax#40128)."""
    x = jnp.ones((1, 1024, 2, SIZE), jnp.bfloat16)

    def loss(sinks_H):
        return exact_attention.softmax_attention(x, x, x, sinks_H=sinks_H).astype(jnp.float32).sum()

    weight = np.exp(SIZE**0.5) * np.arange(1, 1025)
    want = -SIZE * (weight / (1.0 + weight) ** 2).sum()
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(jnp.zeros(2)), [want] * 2, rtol=5e-3)


@pytest.mark.parametrize('implementation', ['xla', 'reference'])
@pytest.mark.parametrize(
    ('length', 'heads', 'kv_heads', 'block', 'degree', 'bias', 'scale'),
    [
        (1, 2, 2, None, 4, 1.0, 1.0),
        (7, 2, 1, None, 2, 0.5, 1.0),
        (64, 2, 2, 16, 4, 1.0, 1.0),
        (100, 4, 2, 32, 8, 1.0, 1.0),
        (100, 1, 1, 24, 6, 3.0, 0.25),
        (129, 3, 1, 64, 4, 1.0, 0.1),
        (129, 2, 2, 17, 2, 1.0, 1.0),
    ],
)
def test_polynomial_agrees_with_float64(length, heads, kv_heads, block, degree, bias, scale, implementation):
    q, k, v = draw(2, length, heads, kv_heads)
    attention = functools.partial(
        exact_attention.polynomial_attention,
        degree=degree,
        denominator_bias=bias,
        scale=scale,
        block=block,
        implementation=implementation,
    )
    expected = numpy_attention(q, k, v, mask(length, length), power(degree, bias, scale))
    assert_close(values_and_gradients(attention, q, k, v), expected, 1e-5)


def documents(length, *rows):
    """Returns `starts_BxL` of rows whose documents begin here, and the keys that each query may see, [B, L, L]."""
    place = np.arange(length)
    starts = np.maximum.accumulate([np.where(np.isin(place, row), place, 0) for row in rows], axis=1)
    return jnp.asarray(starts, jnp.int32), place >= starts[..., None]


@pytest.mark.parametrize(
    ('implementation', 'block', 'window'),
    [('xla', None, None), ('xla', 24, None), ('xla', 32, 10), ('reference', None, 10), ('reference', None, None)],
)
def test_a_document_sees_only_itself(block, window, implementation):
    q, k, v = draw(2, 100, 4, 2)
    given = dict(block=block, implementation=implementation)
    softmax = functools.partial(exact_attention.softmax_attention, window=window, **given)
    polynomial = functools.partial(exact_attention.polynomial_attention, degree=4, **given)
    cases = [(softmax, exponential(SIZE**-0.5))] + [(polynomial, power(4, 1.0, 1.0))] * (window is None)
    for few_or_many in (([0, 5, 6, 40], [0]), (range(100), [64, 99])):
        starts, seen = documents(100, *map(list, few_or_many))
        seen = seen & mask(100, 100, window=window)
        for attention, kernel in cases:
            got = values_and_gradients(attention, q, k, v, starts_BxL=starts)
            assert_close(got, numpy_attention(q, k, v, seen, kernel), 1e-5)


@pytest.mark.parametrize('begin', [0, 200])
@pytest.mark.parametrize('operation', ['softmax_attention', 'polynomial_attention'])
def test_other_documents_change_no_bit_of_gated_weights(operation, begin):
    """Sums of logs, and of their gradients, restart at each document: no rounding of other documents is in them."""
    q, k, v = draw(1, 300, 4, 2)
    log_decay = -jax.random.exponential(jax.random.key(1), k.shape[:3]) * 0.3
    starts, _ = documents(300, [0, 150, 260])
    options = {} if operation == 'softmax_attention' else {'degree': 4}
    own = np.arange(300) // 150 == 1
    own[260:] = False

    @jax.jit
    def outputs_and_gradients(q, k, log_decay):
        def attend(log_decay):
            masks = dict(starts_BxL=starts[:, begin:], q_offset=jnp.int32(begin) if begin else 0)
            function = getattr(exact_attention, operation)
            o = function(q[:, begin:], k, v, log_decay_BxMxK=log_decay, block=64, **masks, **options)
            return o.sum(), o

        gradient, o = jax.grad(attend, has_aux=True)(log_decay)
        return o[:, own[begin:]], gradient[:, own]

    base = outputs_and_gradients(q, k, log_decay)
    change = jnp.where(own, 0.0, 1.0)[None, :, None]
    other = outputs_and_gradients(
        q + change[..., None], k - change[..., None], log_decay * jnp.where(own[:, None], 1, 1.3)
    )
    jax.tree.map(np.testing.assert_array_equal, other, base)
    assert not np.array_equal(outputs_and_gradients(q, k, log_decay.at[:, 230].add(-1.0))[0], base[0])


def test_documents_need_queries_and_keys_of_the_same_tokens():
    q, k, v = draw(1, 8, 2, 2, keys=9)
    with pytest.raises(OperationError, match='starts_BxL'):
        exact_attention.softmax_attention(q, k, v, starts_BxL=jnp.zeros((1, 8), jnp.int32))


@pytest.mark.parametrize('length', [7, 129])
def test_bfloat16_stays_close_to_float64(length):
    q, k, v = draw(1, length, 4, 2, dtype=jnp.bfloat16)
    softmax = functools.partial(exact_attention.softmax_attention, block=32)
    polynomial = functools.partial(exact_attention.polynomial_attention, degree=4, block=32)
    for attention, kernel in ((softmax, exponential(SIZE**-0.5)), (polynomial, power(4, 1.0, 1.0))):
        got = values_and_gradients(attention, q, k, v)
        assert all(g.dtype == jnp.bfloat16 for g in got)
        assert_close(got, numpy_attention(q, k, v, mask(length, length), kernel), 2e-2)


@pytest.mark.parametrize('keys', [40, 100])
def test_without_the_causal_mask_all_keys_count(keys):
    q, k, v = draw(1, 70, 2, 1, keys=keys)
    softmax = functools.partial(exact_attention.softmax_attention, causal=False, block=24)
    polynomial = functools.partial(exact_attention.polynomial_attention, degree=4, causal=False, block=24)
    for attention, kernel in ((softmax, exponential(SIZE**-0.5)), (polynomial, power(4, 1.0, 1.0))):
        expected = numpy_attention(q, k, v, np.ones((70, keys)), kernel)
        assert_close(values_and_gradients(attention, q, k, v), expected, 1e-5)


@pytest.mark.parametrize('window', [None, 20])
def test_queries_after_a_cache_see_the_same_keys_as_in_the_whole(window):
    q, k, v = draw(1, 90, 2, 1)
    attend = jax.jit(functools.partial(exact_attention.softmax_attention, window=window))
    whole = attend(q, k, v)
    later = jax.jit(
        lambda offset, start: exact_attention.softmax_attention(
            q[:, 50:60], k, v, window=window, q_offset=offset, k_start=start, block=16
        )
    )
    np.testing.assert_allclose(later(50, 0), whole[:, 50:60], atol=1e-6)
    # Hiding the first keys equals their absence.
    absent = attend(q[:, 13:], k[:, 13:], v[:, 13:])
    np.testing.assert_allclose(later(50, 13), absent[:, 37:47], atol=1e-6)


@pytest.mark.parametrize(
    'attention',
    [
        functools.partial(exact_attention.softmax_attention, block=16),
        functools.partial(exact_attention.softmax_attention, block=16, window=9),
        functools.partial(exact_attention.polynomial_attention, degree=4, block=16),
    ],
)
def test_the_future_changes_nothing_not_one_bit(attention):
    q, k, v = draw(1, 61, 2, 1)
    changed = [x.at[:, 37:].multiply(-3.0) for x in (q, k, v)]
    attention = jax.jit(attention)
    before, after = attention(q, k, v), attention(*changed)
    np.testing.assert_array_equal(before[:, :37], after[:, :37])
    assert np.abs(before[:, 37:] - after[:, 37:]).min(axis=(0, 2, 3)).max() > 0


def test_a_window_forgets_older_keys():
    q, k, v = draw(1, 61, 1, 1)
    attention = jax.jit(functools.partial(exact_attention.softmax_attention, window=10, block=16))
    before = attention(q, k, v)
    after = attention(q, k.at[:, 20].add(5.0), v.at[:, 20].add(5.0))
    changed = np.abs(before - after).max(axis=(0, 2, 3)) > 0
    np.testing.assert_array_equal(np.flatnonzero(changed), np.arange(20, 30))


def test_large_scores_do_not_overflow():
    q, k, v = draw(1, 64, 1, 1)
    sums = jax.grad(lambda q, k: exact_attention.softmax_attention(q, k, v, block=16).sum(), (0, 1))
    for grad in jax.jit(sums)(1e4 * q, k):
        assert np.isfinite(grad).all()
    # Layer-normalized vectors of size 64 have ⟨q, k⟩ ≤ 64: the largest weight of degree 8 is 2.8e14.
    ones = jnp.full((1, 2048, 1, 64), 1.0)
    o = jax.jit(functools.partial(exact_attention.polynomial_attention, degree=8))(ones, ones, ones)
    np.testing.assert_allclose(o, 1.0, rtol=1e-5)


@pytest.mark.parametrize('name', ['softmax', 'polynomial'])
def test_peak_memory_grows_linearly(name):
    options = {'degree': 4} if name == 'polynomial' else {}
    attention = functools.partial(getattr(exact_attention, f'{name}_attention'), **options)

    def temporaries(length):
        x = jax.ShapeDtypeStruct((1, length, 1, 64), jnp.float32)
        gradients = jax.jit(jax.grad(lambda q, k, v: attention(q, k, v).sum(), (0, 1, 2)))
        return gradients.lower(x, x, x).compile().memory_analysis().temp_size_in_bytes

    at_8k, at_32k = (temporaries(n) for n in (8192, 32768))
    assert at_32k / at_8k < 4.2
    assert at_32k < 32768 * 64 * 4 * 16  # a few arrays of q's size; all weights would be 4.3 GB


def test_blocks_above_the_diagonal_cost_nothing():
    """The last key block's values are NaN: computing such a block and multiplying it by zero would spread them."""
    q, k, v = draw(1, 64, 1, 1)
    v = v.at[:, 48:].set(jnp.nan)
    softmax = functools.partial(exact_attention.softmax_attention, block=16)
    polynomial = functools.partial(exact_attention.polynomial_attention, degree=2, block=16)
    for attention in (softmax, polynomial):
        o = jax.jit(attention)(q, k, v)
        assert np.isfinite(o[:, :48]).all()
        assert np.isnan(o[:, 48:]).all()


def test_errors_name_the_field():
    q, k, v = draw(1, 8, 3, 2)
    with pytest.raises(OperationError, match='n_kv_heads = 2: must divide n_heads = 3'):
        exact_attention.softmax_attention(q, k, v)
    q, k, v = draw(1, 8, 2, 2)
    with pytest.raises(OperationError, match='degree = 3'):
        exact_attention.polynomial_attention(q, k, v, degree=3)
    with pytest.raises(OperationError, match=r"implementation = 'cudnn'.* needs an NVIDIA GPU"):
        exact_attention.softmax_attention(q, k, v, implementation='cudnn')
    with pytest.raises(OperationError, match='has only cudnn, pallas_tpu, reference, splash, xla'):
        exact_attention.softmax_attention(q, k, v, implementation='flash')


@pytest.mark.parametrize(
    ('target', 'dtype', 'options', 'reason'),
    [
        ('gpu', jnp.float32, {}, 'cudnn computes in bfloat16 or float16, not float32'),
        ('gpu', jnp.bfloat16, {'q_offset': 3}, 'cudnn takes as many queries as keys'),
        (
            'tpu',
            jnp.bfloat16,
            {'causal': False},
            'pallas_tpu takes the causal mask only, splash takes the causal mask only',
        ),
        (
            'tpu',
            jnp.bfloat16,
            {'block': 24},
            'pallas_tpu takes blocks that are multiples of 128 up to 1024, not 24, '
            'splash takes blocks that are multiples of 128, not 24',
        ),
    ],
)
def test_unsupported_calls_fall_back_with_one_warning(target, dtype, options, reason, monkeypatch):
    messages = []
    monkeypatch.setattr(platform, 'target_platform', lambda: target)
    monkeypatch.setattr(platform.LOG, 'warning', messages.append)
    platform._warn_once.cache_clear()
    q, k, v = draw(1, 8, 2, 2, dtype=dtype)
    for _ in range(2):
        o = exact_attention.softmax_attention(q, k, v, **options)
    assert messages == [f'softmax attention: {reason}; using the slower xla path']
    expected = exact_attention.softmax_attention(q, k, v, implementation='reference', **options)
    np.testing.assert_allclose(o.astype(jnp.float32), expected.astype(jnp.float32), atol=3e-2)


@pytest.mark.parametrize(
    ('capability', 'reason'), [('7.5', '7.5'), ('gfx942', 'gfx942'), ('8.0', None), ('12.0', None)]
)
def test_gpus_without_flash_attention_in_cudnn_use_xla(capability, reason, monkeypatch):
    """On Turing and earlier, and on AMD GPUs, cuDNN's kernel would fail in the first step."""
    gpu = types.SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(platform, 'target_platform', lambda: 'gpu')
    monkeypatch.setattr(jax, 'local_devices', lambda backend=None: [gpu])
    call = SoftmaxCall(*draw(1, 8, 2, 2, dtype=jnp.bfloat16), scale=1.0)
    found = exact_attention.SOFTMAX['cudnn'].unsupported(call)
    assert found == (reason and f'needs an NVIDIA GPU of compute capability 8 (A100, L4) or later, not {reason}')


@pytest.mark.parametrize('window', [None, 3])
def test_cudnn_gets_an_even_number_of_tokens(window, monkeypatch):
    """Gradients refuse an odd number. No query sees the added token, and it is cut off. Without a causal mask, queries
    would see it."""
    q, k, v = draw(1, 9, 2, 2)
    lengths, cudnn = [], jax.nn.dot_product_attention

    def attend(q, k, v, *, implementation, **options):
        lengths.append((implementation, q.shape[1], k.shape[1]))
        return cudnn(q, k, v, implementation='xla', **options)

    monkeypatch.setattr(jax.nn, 'dot_product_attention', attend)
    kernels = exact_attention.SOFTMAX['cudnn']
    found = values_and_gradients(softmax_by(kernels.softmax_attention, scale=0.5, window=window), q, k, v)
    expected = functools.partial(exact_attention.softmax_attention, scale=0.5, window=window)
    assert set(lengths) == {('cudnn', 10, 10)}
    for got, want in zip(found, values_and_gradients(expected, q, k, v), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    monkeypatch.setattr(platform, 'target_platform', lambda: 'gpu')
    q, k, v = draw(1, 9, 2, 2, dtype=jnp.bfloat16)
    assert 'odd number' in kernels.unsupported(SoftmaxCall(q, k, v, scale=1.0, causal=False))
    assert kernels.unsupported(SoftmaxCall(q, k, v, scale=1.0)) is None


def test_accelerators_get_their_kernels(monkeypatch):
    q, k, v = draw(1, 8, 2, 2, dtype=jnp.bfloat16)
    for target, name in (('gpu', 'cudnn'), ('tpu', 'pallas_tpu'), ('cpu', 'xla')):
        monkeypatch.setattr(platform, 'target_platform', lambda target=target: target)
        chosen = exact_attention.SOFTMAX.choose(None, SoftmaxCall(q, k, v, scale=1.0))
        assert chosen is exact_attention.SOFTMAX[name]


def test_the_mesh_in_context_decides_and_the_result_is_the_same():
    devices = jax.devices()[:4]
    mesh = jax.sharding.Mesh(np.array(devices).reshape(2, 2), ('data', 'fsdp'))
    q, k, v = draw(4, 40, 2, 1)
    attention = functools.partial(exact_attention.softmax_attention, block=16)
    alone = values_and_gradients(attention, q, k, v)
    with jax.set_mesh(mesh):
        assert platform.target_platform() == 'cpu'
        assert platform.batch_shards() == 4
        rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(('data', 'fsdp')))
        together = values_and_gradients(attention, *(jax.device_put(x, rows) for x in (q, k, v)))
    for a, b in zip(alone, together, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('length', 'kv_heads', 'window', 'masked'),
    [(300, 2, None, False), (2048, 4, None, True), (2048, 1, 700, True), (8192, 4, None, False)],
)
def test_splash_compiles_for_a_tpu(length, kv_heads, window, masked, monkeypatch):
    """The test compiles forward and backward for a mesh of four chips, on a machine without any."""
    compile_splash('v5e:2x2', (8, length, 4, 64), kv_heads, jnp.bfloat16, window, masked, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize('length', [2048, 32768])
@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize('topology', ['v4:2x2x1', 'v5e:2x2'])
def test_splash_compiles_with_wide_heads(topology, dtype, length, monkeypatch):
    """The kernel takes as many heads at a time as fit into the chip's memory."""
    compile_splash(topology, (4, length, 2, 256), 2, dtype, None, False, monkeypatch)


def compile_splash(topology, shape_BxLxHxD, kv_heads, dtype, window, masked, monkeypatch):
    if importlib.util.find_spec('libtpu') is None:
        pytest.skip('libtpu is not installed')
    for name, value in LIBTPU_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    batch, length, heads, size = shape_BxLxHxD
    mesh = jax.sharding.Mesh(describe_devices(parse(topology)), ('data',))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))
    q, k = (jax.ShapeDtypeStruct((batch, length, h, size), dtype, sharding=rows) for h in (heads, kv_heads))
    starts = jax.ShapeDtypeStruct((batch, length), jnp.int32, sharding=rows) if masked else None

    def gradients(q, k, v, starts):
        attention = functools.partial(exact_attention.softmax_attention, window=window, starts_BxL=starts)
        return jax.grad(lambda *x: attention(*x).astype(jnp.float32).sum(), (0, 1, 2))(q, k, v)

    with jax.set_mesh(mesh):
        assert platform.target_platform() == 'tpu'
        compiled = jax.jit(gradients).trace(q, k, k, starts).lower(lowering_platforms=('tpu',)).compile()
    assert 'splash' in compiled.as_text()


interpreted = functools.partial(pallas_tpu.softmax_attention, interpret=True)


@pytest.mark.parametrize('fused', [True, False])
@pytest.mark.parametrize(
    ('length', 'kv_heads', 'block', 'window'), [(100, 2, None, None), (300, 1, 128, None), (1100, 2, 128, 150)]
)
def test_splash_agrees_with_float64(length, kv_heads, block, window, fused, monkeypatch):
    """The TPU kernels are interpreted: padding, scale, shared key heads, both kinds of backward kernel."""
    monkeypatch.setattr(pallas_tpu, 'FUSED_SHARE', 1 if fused else 0)
    q, k, v = draw(1, length, 2, kv_heads)
    attention = softmax_by(interpreted, scale=0.3, window=window, block=block)
    expected = numpy_attention(q, k, v, mask(length, length, window=window), exponential(0.3))
    assert_close(values_and_gradients(attention, q, k, v), expected, 1e-5)


def test_splash_caps_scores():
    q, k, v = draw(1, 300, 2, 1)
    attention = softmax_by(interpreted, scale=0.3, block=128, score_cap=0.7)

    def kernel(s):
        w = np.exp(0.7 * np.tanh(s * 0.3 / 0.7))
        return w, w * 0.3 * (1.0 - np.tanh(s * 0.3 / 0.7) ** 2), 0.0

    expected = numpy_attention(q, k, v, mask(300, 300), kernel)
    assert_close(values_and_gradients(attention, q, k, v), expected, 1e-5)


@pytest.mark.parametrize(('length', 'block'), [(100, None), (1100, 128)])
def test_splash_separates_documents(length, block):
    q, k, v = draw(1, length, 2, 2)
    starts, seen = documents(length, [0, 3, 40, 90, 700])
    attention = softmax_by(interpreted, scale=0.3, starts_BxL=starts, block=block)
    expected = numpy_attention(q, k, v, seen & mask(length, length), exponential(0.3))
    assert_close(values_and_gradients(attention, q, k, v), expected, 1e-5)


@pytest.mark.parametrize(
    ('window', 'begins'),
    [(40, None), pytest.param(128, None, marks=pytest.mark.slow), (70, [0, 3, 90, 128, 250]), (2, None)],
)
def test_splash_sees_keys_of_the_previous_part_inside_the_window(window, begins, monkeypatch):
    """The operation itself runs on two devices, each with half of the tokens."""
    monkeypatch.setattr(platform, 'target_platform', lambda: 'tpu')
    monkeypatch.setattr(pallas_tpu, 'softmax_attention', interpreted)
    length = 256
    q, k, v = draw(1, length, 2, 2)
    starts, seen = (None, 1) if begins is None else documents(length, begins)

    def attention(q, k, v):
        def of_part(q, k, v, starts):
            options = {'scale': 0.3, 'window': window, 'implementation': 'splash'}
            return exact_attention.softmax_attention(q, k, v, starts_BxL=starts, **options)

        return sequence.over_tokens(of_part, (1, 1, 1, None if starts is None else 1))(q, k, v, starts)

    expected = numpy_attention(q, k, v, seen * mask(length, length, window=window), exponential(0.3))
    with jax.set_mesh(jax.sharding.Mesh(jax.devices()[:2], ('sequence',))):
        assert_close(values_and_gradients(attention, q, k, v), expected, 1e-5)


def test_a_window_across_several_parts_is_not_taken_for_a_shorter_one(monkeypatch):
    """There are four parts of 64 tokens. A window of 193 reaches back over as many keys as there are, but over other
    ones."""
    monkeypatch.setattr(platform, 'target_platform', lambda: 'tpu')
    q, k, v = draw(1, 256, 2, 2)

    def attention(q, k, v):
        of_part = functools.partial(exact_attention.softmax_attention, scale=0.3, window=193)
        return sequence.over_tokens(of_part, (1, 1, 1))(q, k, v)

    expected = numpy_attention(q, k, v, mask(256, 256, window=193), exponential(0.3))
    with jax.set_mesh(jax.sharding.Mesh(jax.devices()[:4], ('sequence',))):
        assert_close(values_and_gradients(attention, q, k, v), expected, 1e-5)


def test_splash_adds_up_gradients_of_queries_in_bfloat16():
    """One gradient comes from each of nine blocks of keys."""
    q, k, v = (x.astype(jnp.bfloat16) for x in draw(1, 1100, 2, 2))
    attention = softmax_by(interpreted, scale=0.3, block=128)
    exact = [np.asarray(x, np.float64) for x in (q, k, v)]
    expected = numpy_attention(*exact, mask(1100, 1100), exponential(0.3))
    assert_close(values_and_gradients(attention, q, k, v), expected, 2e-2)


def test_splash_computes_all_gradients_at_once_if_they_fit(monkeypatch):
    def is_fused(batch, heads, length, key_block):
        return pallas_tpu.is_fused(jax.ShapeDtypeStruct((batch, heads, length, 64), jnp.bfloat16), key_block)

    for kind, windows in (('TPU v5 lite', 1), ('TPU v6 lite', 2), ('TPU v5', 7)):
        monkeypatch.setattr(platform, 'device_kind', lambda kind=kind: kind)
        assert is_fused(4, 12, 8192, 1024)
        assert is_fused(windows, 12, 32_768, 2048)
        assert not is_fused(windows + 1, 12, 32_768, 2048)
        assert not is_fused(1, 12, 131_072, 2048)


def test_splash_blocks_divide_the_padded_length():
    for length in (1, 100, 128, 300, 1024, 1025, 2048, 3000, 32768):
        block = pallas_tpu.block_size(length)
        assert block % 128 == 0
        assert block <= 1024
        assert -(-length // block) * block - length < block


@pytest.mark.parametrize(
    ('kind', 'width', 'length', 'expected'),
    [
        ('TPU v5 lite', 128, 32768, (1024, 32768, 2048)),
        ('TPU v5 lite', 512, 32768, (1024, 32768, 1024)),
        ('TPU v5 lite', 1024, 32768, (512, 32768, 512)),
        ('TPU v4', 256, 2048, (1024, 2048, 1024)),
        ('TPU v4', 512, 2050, (512, 2560, 512)),
    ],
)
def test_splash_takes_shorter_blocks_of_wide_heads(kind, width, length, expected, monkeypatch):
    monkeypatch.setattr(platform, 'device_kind', lambda: kind)
    assert pallas_tpu.blocks(length, width) == expected


@pytest.mark.parametrize(('window', 'block'), [(2, 256), (512, 256), (513, 512), (4096, 512)])
def test_splash_takes_short_blocks_of_a_window_and_keeps_no_gradients_for_each(window, block, monkeypatch):
    assert pallas_tpu.blocks(32768, 128, window=window) == (block, 32768, block)
    made = []
    monkeypatch.setattr(pallas_tpu, '_kernel', lambda *given: made.append(given) or (lambda q, k, v, segments: q))
    x = jnp.zeros((1, 512, 1, 64), jnp.bfloat16)
    pallas_tpu.softmax_attention(SoftmaxCall(x, x, x, scale=1.0, window=window))
    ((_, length, _, _, _, fused, *_),) = made
    assert length == 512
    assert not fused
