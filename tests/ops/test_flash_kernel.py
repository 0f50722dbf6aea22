"""The TPU kernels of exact attention, interpreted on the CPU: uninitialised memory is NaN, races are detected."""

import dataclasses
import functools
import importlib.util

import definitions
import grids
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import interpret_kernels, interpret_plainly

from lm.hardware import LIBTPU_ENVIRONMENT, describe_devices, parse
from lm.ops import exact_attention, platform, sequence
from lm.ops.chips import LIMITS
from lm.ops.exact_attention import PolynomialCall, SoftmaxCall, xla
from lm.ops.exact_attention.tpu import pairs, plan, polynomial, softmax, splash
from lm.ops.powers import power_and_slope

NAMES = ('o', 'dq', 'dk', 'dv', 'dsinks')
POWER, SOFTMAX = {'degree': 4}, {'scale': 0.25}
both = pytest.mark.parametrize('rule', [POWER, SOFTMAX], ids=['polynomial', 'softmax'])


pytestmark = pytest.mark.usefixtures('no_races')


def example(length, *, batch=1, heads=1, kv_heads=None, size=16, value_size=None, dtype=jnp.float32, seed=0):
    """Returns layer-normalized q and k, v, and a gradient of the output."""
    rng = np.random.default_rng(seed)
    kv_heads, value_size = kv_heads or heads, value_size or size
    shapes = [(heads, size), (kv_heads, size), (kv_heads, value_size), (heads, value_size)]
    q, k, v, do = (rng.standard_normal((batch, length, *shape)) for shape in shapes)
    q, k = ((x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True) for x in (q, k))
    return [jnp.asarray(a, dtype) for a in (q, k, v, do)]


def starts_of(*documents, length):
    """Returns each token's document start, per row; documents begin at 0 and at the given tokens."""
    index = np.arange(length)
    rows = [np.max([np.where(index >= begins, begins, 0) for begins in (0, *row)], axis=0) for row in documents]
    return jnp.asarray(np.stack(rows), jnp.int32)


def by_definition(options, q, k, v, do, starts=None, sinks=None):
    """Computes outputs and gradients in float64. With sinks their gradient is the last."""
    seen = np.tri(q.shape[1])
    if (window := options.get('window')) is not None:
        seen = seen - np.tri(q.shape[1], k=-window)
    if starts is not None:
        seen = seen * (np.arange(q.shape[1]) >= np.asarray(starts)[:, None, :, None])
    degree, scale, cap = options.get('degree'), options.get('scale', 1.0), options.get('score_cap')
    bias = options.get('denominator_bias', 1.0) if degree else 0.0

    def weigh(s):
        nonlocal bias
        s = scale * s
        if degree is not None:
            return s**degree * seen, [degree * scale * s ** (degree - 1) * seen], bias
        bent = 1.0 if cap is None else 1.0 - np.tanh(s / cap) ** 2
        s = np.where(seen, s if cap is None else cap * np.tanh(s / cap), -np.inf)
        w = np.exp(s - s.max(-1, keepdims=True))
        if sinks is not None:
            bias = np.exp(np.asarray(sinks, np.float64)[:, None, None] - s.max(-1, keepdims=True))
        return w, [scale * w * bent], bias

    o, dv, dbias, dq, dk = definitions.attend([(q, k)], v, do, weigh)
    found = [o, dq, dk, dv]
    return found if sinks is None else [*found, (dbias * bias).sum((0, 2, 3))]


def quick(function):
    """Jits without optimisation: compilation takes most of the time here."""
    return jax.jit(function, compiler_options={'xla_backend_optimization_level': 0})


def compute(q, k, v, **options):
    """Computes by the kernels, with the rule in `options`."""
    if 'degree' in options:
        return polynomial.polynomial_attention(PolynomialCall(q, k, v, **options))
    return softmax.softmax_attention(SoftmaxCall(q, k, v, **options))


@functools.lru_cache(maxsize=8)  # they take memory
def program(planner, **options):
    """Compiles once per shape of the arrays; `planner` is the current one, which some tests change."""

    def outputs_and_gradients(q, k, v, do, starts, *sinks):
        function = functools.partial(compute, **options, starts_BxL=starts)
        if sinks:
            o, vjp = jax.vjp(lambda q, k, v, sinks_H: function(q, k, v, sinks_H=sinks_H), q, k, v, *sinks)
        else:
            o, vjp = jax.vjp(function, q, k, v)
        return [o, *vjp(do)]

    return quick(outputs_and_gradients)


def by_kernels(q, k, v, do, starts=None, sinks=None, **options):
    with interpret_kernels():
        return program(plan.plan_for, **options)(q, k, v, do, starts, *([] if sinks is None else [sinks]))


def errors(got, want):
    """Returns relative errors by name."""
    return {
        name: np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)
        for name, a, b in zip(NAMES[: len(want)], got, want, strict=True)
    }


CASES = {
    'degree 2': ({'degree': 2, 'block': 128}, {'length': 200}),
    'degree 4, odd length': ({'degree': 4, 'block': 128}, {'length': 301, 'heads': 2, 'size': 64}),
    'degree 6, scaled': ({'degree': 6, 'block': 128, 'denominator_bias': 3.0, 'scale': 0.25}, {'length': 150}),
    'degree 8': ({'degree': 8, 'block': 128}, {'length': 257, 'size': 64}),
    'degree 16': ({'degree': 16, 'block': 128}, {'length': 140, 'size': 64}),
    'no bias': ({'degree': 4, 'block': 128, 'denominator_bias': 0.0}, {'length': 150}),
    'one short block': ({'degree': 4}, {'length': 77}),
    'grouped queries': ({'degree': 4, 'block': 128}, {'length': 150, 'heads': 4, 'kv_heads': 2}),
    'odd head sizes': ({'degree': 4, 'block': 128}, {'length': 131, 'size': 10, 'value_size': 20}),
    'heads of 128': ({'degree': 4, 'block': 128}, {'length': 131, 'size': 128}),
    'tiles': ({'degree': 4, 'block': 512}, {'length': 600}),
    'softmax, odd length': ({'scale': 0.125, 'block': 128}, {'length': 301, 'heads': 2, 'size': 64}),
    'softmax, odd scale': ({'scale': 0.3, 'block': 128}, {'length': 150}),
    'softmax, one key takes all': ({'scale': 12.0, 'block': 128}, {'length': 300}),
    'softmax, one short block': ({'scale': 0.25}, {'length': 77}),
    'softmax, grouped queries': ({'scale': 0.25, 'block': 128}, {'length': 150, 'heads': 4, 'kv_heads': 2}),
    'softmax, odd head sizes': ({'scale': 0.25, 'block': 128}, {'length': 131, 'size': 10, 'value_size': 20}),
    'softmax, pieces': ({'scale': 0.25, 'block': 512}, {'length': 1000}),
}
ROUNDED = ('degree 4, odd length', 'degree 8', 'degree 16', 'grouped queries', 'softmax, odd length', 'softmax, pieces')
EXAMPLES = [(name, 'float32') for name in CASES] + [(name, 'bfloat16') for name in ROUNDED]


@pytest.mark.parametrize('case', grids.draw((pytest.param(one, id=', '.join(one)) for one in EXAMPLES), 14))
def test_outputs_and_gradients(case):
    name, dtype = case
    options, sizes = CASES[name]
    arrays = example(**sizes, dtype=dtype)
    got = by_kernels(*arrays, **options)
    assert all(a.dtype == dtype for a in got)
    found = errors(got, by_definition(options, *arrays))
    limit = 1e-5 if dtype == 'float32' else 2e-2
    assert all(error <= limit for error in found.values()), found


WINDOWS = {  # in blocks of 128
    'shorter than a block': ({'window': 100}, {'length': 301, 'heads': 2, 'kv_heads': 1}),
    'one block': ({'window': 128}, {'length': 390}),
    'one key more': ({'window': 129}, {'length': 390, 'size': 10, 'value_size': 20}),
    'ends inside of a block': ({'window': 300}, {'length': 700}),
    'the own key': ({'window': 1}, {'length': 150}),
    'the whole': ({'window': 151}, {'length': 150}),
}


@pytest.mark.parametrize(
    ('name', 'dtype'), [*((name, 'float32') for name in WINDOWS), ('ends inside of a block', 'bfloat16')]
)
def test_windows(name, dtype):
    options, sizes = WINDOWS[name]
    arrays = example(**sizes, dtype=dtype)
    found = by_kernels(*arrays, **SOFTMAX, **options, block=128)
    if name == 'the own key':  # a weight of 1 has no gradient
        np.testing.assert_array_equal(found[0], arrays[2])
        np.testing.assert_allclose(found[3], arrays[3], rtol=1e-6)
        assert max(np.abs(a).max() for a in found[1:3]) <= 1e-5
        return
    found = errors(found, by_definition(SOFTMAX | options, *arrays))
    limit = 1e-5 if dtype == 'float32' else 2e-2
    assert all(error <= limit for error in found.values()), found


@pytest.mark.parametrize(('window', 'sides'), [(200, 128), (300, 128), (256, 256)])
def test_windows_with_documents_in_blocks_of_several_tiles(window, sides, monkeypatch):
    plan_for = plan.plan_for
    changed = dict.fromkeys(('piece', 'leveled', 'forward_diagonal', 'tile', 'backward_diagonal'), sides)
    monkeypatch.setattr(plan, 'plan_for', lambda *args: dataclasses.replace(plan_for(*args), **changed))
    arrays = example(700, batch=2)
    starts = starts_of((300, 520), (10, 255), length=700)
    got = by_kernels(*arrays, **SOFTMAX, window=window, block=256, starts=starts)
    found = errors(got, by_definition(SOFTMAX | {'window': window}, *arrays, starts))
    assert all(error <= 1e-5 for error in found.values()), found


def test_nothing_leaks_out_of_a_window():
    """No bit of a key reaches queries outside of its window, and no bit of such a query reaches the key's gradients."""
    q, k, v, do = example(390)
    options = {**SOFTMAX, 'window': 140, 'block': 128}
    want = by_kernels(q, k, v, do, **options)
    o, dq, *_ = by_kernels(q, k.at[:, 100].multiply(-3.0), v.at[:, 100].multiply(-3.0), do, **options)
    for a, b in ((o, want[0]), (dq, want[1])):
        same = np.all(np.asarray(a) == np.asarray(b), axis=(0, 2, 3))
        assert set(np.flatnonzero(~same)) == set(range(100, 240))
    _, _, *sums = by_kernels(q.at[:, 300].multiply(-3.0), k, v, do.at[:, 300].multiply(-3.0), **options)
    for a, b in zip(sums, want[2:], strict=True):
        same = np.all(np.asarray(a) == np.asarray(b), axis=(0, 2, 3))
        assert set(np.flatnonzero(~same)) == set(range(161, 301))


def test_a_window_visits_only_the_blocks_that_it_reaches():
    """The work grows with the window, not with the square of the length; gradients of few queries wait in VMEM."""
    call = SoftmaxCall(*(jax.ShapeDtypeStruct((1, 65536, 1, 64), jnp.bfloat16),) * 3, scale=1.0, window=2048)
    made = plan.plan_for(softmax.SoftmaxRule(1.0), call)
    blocks = 65536 // made.block
    walks = [
        pairs.walk_by_queries(made.diagonals(blocks), made.window),
        pairs.walk_by_keys(made.diagonals(blocks), 0, blocks, made.window),
    ]
    assert all(walk.steps == 3 * blocks - 3 for walk in walks)
    assert (made.block, made.window.back, made.chunk) == (1024, 2, blocks)


EXTRAS = {
    'sinks': ({}, [0.5, -2.0, 3.0, 40.0]),
    'sinks of a window': ({'window': 200}, [0.5, -2.0, 3.0, -40.0]),
    'a cap': ({'score_cap': 2.0}, None),
    'a cap and sinks of a window': ({'score_cap': 2.0, 'window': 100}, [0.5, -2.0, 3.0, 1.0]),
}


@pytest.mark.parametrize(('name', 'dtype'), [*((name, 'float32') for name in EXTRAS), ('sinks', 'bfloat16')])
def test_sinks_and_caps(name, dtype):
    options, sinks = EXTRAS[name]
    arrays = example(301, batch=2, heads=4, kv_heads=2, dtype=dtype)
    starts = starts_of((50, 140, 150), (), length=301)
    sinks = None if sinks is None else jnp.asarray(sinks)
    found = errors(
        by_kernels(*arrays, starts, sinks, **SOFTMAX, **options, block=128),
        by_definition(SOFTMAX | options, *arrays, starts, sinks),
    )
    limit = 1e-5 if dtype == 'float32' else 2e-2
    assert all(error <= limit for error in found.values()), found


FILLED = {
    'odd length': ({'scale': 0.125}, {'length': 150, 'size': 64}, None),
    'one key takes all': ({'scale': 12.0}, {'length': 300}, None),
    'pieces of grouped queries': (SOFTMAX, {'length': 700, 'heads': 4, 'kv_heads': 2, 'value_size': 20}, None),
    'a cap and sinks': (
        SOFTMAX | {'score_cap': 2.0, 'window': 100},
        {'length': 301, 'heads': 4},
        [0.5, -2.0, 3.0, 1.0],
    ),
}


@pytest.mark.parametrize(
    'name', [pytest.param(name, marks=() if name == 'odd length' else pytest.mark.slow) for name in FILLED]
)
def test_filled_products_are_as_exact(name, monkeypatch):
    """Factors of scores and sums of weights in the products add no error to the rounding of weights and values."""
    options, sizes, sinks = FILLED[name]
    arrays = example(**sizes, dtype='bfloat16')
    starts = starts_of((50, 140), length=sizes['length'])
    sinks = None if sinks is None else jnp.asarray(sinks)
    block = 512 if 'pieces' in name else 128
    want = by_definition(options, *arrays, starts, sinks)
    plain = errors(by_kernels(*arrays, starts, sinks, **options, block=block), want)
    plan_for = plan.plan_for
    monkeypatch.setattr(plan, 'plan_for', lambda *args: dataclasses.replace(plan_for(*args), fills_products=True))
    filled = errors(by_kernels(*arrays, starts, sinks, **options, block=block), want)
    assert all(filled[part] <= 1.1 * error + 1e-4 for part, error in plain.items()), (filled, plain)
    assert filled != plain


@pytest.mark.parametrize(
    ('chip', 'size', 'dtype', 'fills'),
    [
        ('v6e', 64, 'bfloat16', True),
        ('v6e', 128, 'bfloat16', True),
        ('v6e', 64, 'float32', False),
        ('v5e', 64, 'bfloat16', False),
        ('v4', 64, 'bfloat16', True),
        ('v4', 128, 'bfloat16', False),
    ],
)
def test_products_are_filled_where_heads_leave_rows(chip, size, dtype, fills, monkeypatch):
    limits = LIMITS[chip]
    monkeypatch.setattr(platform, 'matrix_side', lambda: limits.matrix_side)
    monkeypatch.setattr(platform, 'vmem', lambda: (limits.vmem_mib * 2**20,))
    call = SoftmaxCall(*(jax.ShapeDtypeStruct((1, 2048, 1, size), dtype),) * 3, scale=1.0)
    assert plan.plan_for(softmax.SoftmaxRule(1.0), call).fills_products == fills


DOCUMENTS = {
    'inside of blocks, and none': ([(50, 140, 150), ()], {'length': 301, 'heads': 2, 'kv_heads': 1}),
    'at the edges of blocks': ([(128, 256)], {'length': 390}),
    'beside the edges of blocks': ([(127, 129, 383)], {'length': 390}),
    'one token each': ([tuple(range(1, 131))], {'length': 390}),
    'a block that sees none of another': ([(130,)], {'length': 390}),
}


@both
@pytest.mark.parametrize(
    ('name', 'dtype'), [*((name, 'float32') for name in DOCUMENTS), ('inside of blocks, and none', 'bfloat16')]
)
def test_documents(name, dtype, rule):
    begins, sizes = DOCUMENTS[name]
    arrays = example(**sizes, batch=len(begins), dtype=dtype)
    starts = starts_of(*begins, length=sizes['length'])
    found = errors(by_kernels(*arrays, **rule, block=128, starts=starts), by_definition(rule, *arrays, starts))
    limit = 1e-5 if dtype == 'float32' else 2e-2
    assert all(error <= limit for error in found.values()), found


@both
def test_documents_in_blocks_of_several_tiles(monkeypatch, rule):
    plan_for = plan.plan_for
    sides = dict.fromkeys(('piece', 'leveled', 'forward_diagonal', 'tile', 'backward_diagonal'), 128)
    monkeypatch.setattr(plan, 'plan_for', lambda *args: dataclasses.replace(plan_for(*args), **sides))
    arrays = example(700, batch=2)
    starts = starts_of((300, 520), (10, 255), length=700)
    found = errors(by_kernels(*arrays, **rule, block=256, starts=starts), by_definition(rule, *arrays, starts))
    assert all(error <= 1e-5 for error in found.values()), found


@both
def test_nothing_leaks_out_of_a_document(rule):
    """No bit of a document reaches another document, forward or backward."""
    arrays = example(390)
    starts = starts_of((140,), length=390)
    options = {**rule, 'block': 128, 'starts': starts}
    want = by_kernels(*arrays, **options)
    changed = by_kernels(*(a.at[:, :140].multiply(-3.0) for a in arrays), **options)
    for a, b in zip(changed, want, strict=True):
        np.testing.assert_array_equal(a[:, 140:], b[:, 140:])
        assert not np.allclose(a[:, :140], b[:, :140])


@both
@pytest.mark.parametrize('kv_heads', [1, 2])
def test_queries_in_chunks(kv_heads, rule, monkeypatch):
    """First there are three chunks of one block, because the gradient of all queries does not fit. Then there is one
    chunk of two blocks."""
    plan_for, used = plan.plan_for, []

    def in_chunks(*args):
        used.append(dataclasses.replace(plan_for(*args), chunk=1 if kv_heads == 1 else 2))
        return used[-1]

    monkeypatch.setattr(plan, 'plan_for', in_chunks)
    arrays = example(300, heads=2, kv_heads=kv_heads)
    starts = starts_of((140,), length=300) if kv_heads == 1 else None
    found = errors(by_kernels(*arrays, **rule, block=128, starts=starts), by_definition(rule, *arrays, starts))
    assert used
    assert all(error <= 1e-5 for error in found.values()), found


@both
def test_nothing_leaks_from_the_future(rule):
    q, k, v, do = example(200)
    cut = 70
    changed = [x.at[:, cut:].multiply(-3.0) for x in (q, k, v)]
    o, dq, *_ = by_kernels(q, k, v, do, **rule, block=128)
    o_changed, dq_changed, *_ = by_kernels(*changed, do, **rule, block=128)
    for a, b in ((o, o_changed), (dq, dq_changed)):
        np.testing.assert_array_equal(a[:, :cut], b[:, :cut])
        assert not np.allclose(a[:, cut:], b[:, cut:])


def test_small_gradients_of_large_denominators_survive():
    """Denominators of 10^30 and gradients of 10^-10: float32 cannot hold their quotient."""
    q, k, v, do = example(140, size=64)
    q, k = (q[:, :1] + 0.3 * x for x in (q, k))
    arrays = [q, k, v, 1e-10 * do]
    want = by_definition({'degree': 16}, *arrays)
    found = errors(by_kernels(*arrays, degree=16, block=128), want)
    assert all(error <= 1e-5 for error in found.values()), found


@both
def test_batch_split_over_a_mesh(rule):
    q, k, v, do = example(130, batch=4, heads=2, kv_heads=1)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ('data', 'fsdp'))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(('data', 'fsdp')))

    starts = starts_of((5,), (), (70,), (128,), length=130)

    def loss(q, k, v, do, starts):
        o = compute(q, k, v, **rule, block=128, starts_BxL=starts)
        return jnp.sum(o * do), o

    with jax.set_mesh(mesh), interpret_plainly():
        split = [jax.device_put(a, rows) for a in (q, k, v, do, starts)]
        grads, o = quick(jax.grad(loss, argnums=range(3), has_aux=True))(*split)
    assert o.sharding.is_equivalent_to(rows, o.ndim)
    found = errors([o, *grads], by_definition(rule, q, k, v, do, starts))
    assert all(error <= 1e-5 for error in found.values()), found


PARTS = {
    'two': (2, {'length': 512}, {}),
    'two halves of several blocks': (2, {'length': 1024, 'heads': 2, 'kv_heads': 1}, {'block': 128}),
    'four': (4, {'length': 1024, 'value_size': 32}, {}),
    'documents': (2, {'length': 1024}, {'block': 128, 'documents': [(5, 130, 700)]}),
    'rows on other devices': (2, {'length': 1024, 'heads': 2}, {'block': 128, 'documents': [(5, 130, 700), (512,)]}),
    'queries a chunk at a time': (2, {'length': 1024}, {'block': 128, 'chunk': 3}),
}


def by_parts(parts, rule, q, k, v, do, starts=None, block=None, sinks=None):
    """Runs the operation that a model calls; each of `parts` devices has its part of a window."""

    def loss(q, k, v, do, starts, *sinks):
        def function(q, k, v, starts, *sinks):
            options = {'sinks_H': sinks[0]} if sinks else {}
            operation = exact_attention.polynomial_attention if 'degree' in rule else exact_attention.softmax_attention
            return operation(q, k, v, **rule, **options, block=block, starts_BxL=starts, implementation='pallas_tpu')

        axes = (1, 1, 1, None if starts is None else 1, *[None] * len(sinks))
        o = sequence.over_tokens(function, axes)(q, k, v, starts, *sinks)
        return jnp.sum((o * do).astype(jnp.float32)), o

    rows = q.shape[0]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[: rows * parts]).reshape(rows, parts), ('data', 'sequence'))
    with jax.set_mesh(mesh), interpret_plainly() if rows > 1 else interpret_kernels():
        sinks = [] if sinks is None else [sinks]
        grads, o = quick(jax.grad(loss, argnums=[0, 1, 2, 5][: 3 + len(sinks)], has_aux=True))(
            q, k, v, do, starts, *sinks
        )
    return [o, *grads]


SOONER = [
    ('documents', SOFTMAX),
    ('rows on other devices', SOFTMAX),
    ('queries a chunk at a time', SOFTMAX),
    ('two', POWER),
]


@pytest.mark.parametrize(
    ('name', 'rule'),
    [
        pytest.param(name, rule, id=f'{name}-{kind}', marks=() if (name, rule) in SOONER else pytest.mark.slow)
        for name in PARTS
        for kind, rule in (('polynomial', POWER), ('softmax', SOFTMAX))
    ],
)
def test_parts_of_a_window_are_the_whole(name, rule, monkeypatch):
    parts, sizes, options = PARTS[name]
    monkeypatch.setattr(platform, 'target_platform', lambda: 'tpu')
    begins, chunk, plan_for, used = options.get('documents'), options.get('chunk'), plan.plan_for, []

    def planned(*args):
        made = plan_for(*args)
        used.append(dataclasses.replace(made, chunk=chunk) if chunk else made)
        return used[-1]

    monkeypatch.setattr(plan, 'plan_for', planned)
    arrays = example(**sizes, batch=len(begins or [()]))
    starts = starts_of(*begins, length=sizes['length']) if begins else None
    found = errors(by_parts(parts, rule, *arrays, starts, options.get('block')), by_definition(rule, *arrays, starts))
    assert all(error <= 1e-5 for error in found.values()), found
    assert {made.parts for made in used} == {parts}


@pytest.mark.parametrize(
    ('parts', 'window', 'documents'),
    [
        (2, 100, [(5, 130, 256, 300)]),
        pytest.param(2, 257, None, marks=pytest.mark.slow),  # as many keys as both parts have
        pytest.param(4, 70, [(5, 130, 256, 300)], marks=pytest.mark.slow),
        pytest.param(2, 1, None, marks=pytest.mark.slow),
    ],
)
def test_parts_see_the_keys_before_them_inside_the_window(parts, window, documents, monkeypatch):
    monkeypatch.setattr(platform, 'target_platform', lambda: 'tpu')
    arrays = example(512, heads=2, kv_heads=1)
    starts = starts_of(*documents, length=512) if documents else None
    rule, sinks = SOFTMAX | {'window': window}, jnp.asarray([1.0, -2.0])
    got = by_parts(parts, rule, *arrays, starts, 128, sinks)
    found = errors(got, by_definition(rule, *arrays, starts, sinks))
    assert all(error <= 1e-5 for error in found.values()), found


@pytest.mark.parametrize(('blocks', 'parts'), [(2, 2), (6, 4), (4, 8), (2, 3)])
def test_every_part_has_equal_work(blocks, parts):
    """All parts together visit every pair once."""
    diagonal_PxI = pairs.number_diagonals(blocks, parts)
    walks = [pairs.walk_by_queries(diagonal_PxI), pairs.walk_by_keys(diagonal_PxI, 0, blocks)]
    whole = {(i, j) for i in range(blocks * parts) for j in range(i + 1)}
    for walk in walks:
        assert not (walk.pairs_PxT[:, :-1] >= pairs.IDLE).any()
        visited = [
            (int(diagonal[pair >> 16]), int(pair & 0xFFFF))
            for diagonal, row in zip(diagonal_PxI, walk.pairs_PxT, strict=True)
            for pair in row[:-1]
        ]
        assert len(visited) == len(whole)
        assert set(visited) == whole


REFUSED = {
    'causal': {'causal': False},
    'as many queries': {'q_offset': 3},
    'queries as keys': {'k_start': jnp.int32(0)},
    'multiples of 128': {'block': 96},
}


@pytest.mark.parametrize('reason', REFUSED)
def test_unsupported_calls_fall_back_with_one_warning(reason, monkeypatch):
    messages = []
    monkeypatch.setattr(platform, 'target_platform', lambda: 'tpu')
    monkeypatch.setattr(platform.LOG, 'warning', messages.append)
    platform._warn_once.cache_clear()
    q, k, v, _ = example(8)
    for _ in range(2):
        o = exact_attention.polynomial_attention(q, k, v, degree=4, **REFUSED[reason])
    assert len(messages) == 1
    assert messages[0].startswith('polynomial attention: pallas_tpu ')
    assert reason in messages[0]
    expected = exact_attention.polynomial_attention(q, k, v, degree=4, implementation='reference', **REFUSED[reason])
    np.testing.assert_allclose(o, expected, atol=1e-5)


def test_dtypes_and_sizes_that_are_refused(monkeypatch):
    def reason(q, k, v, **options):
        return polynomial.unsupported(PolynomialCall(q, k, v, degree=4, **options))

    assert 'TPU' in reason(*example(8)[:3])
    monkeypatch.setattr(platform, 'target_platform', lambda: 'tpu')
    q, k, v, _ = example(8)
    assert reason(q, k, v) is None
    assert 'float16' in reason(*(a.astype(jnp.float16) for a in (q, k, v)))
    assert 'head sizes' in reason(*example(8, size=300)[:3])
    many = jax.ShapeDtypeStruct((1, 2**20, 1, 64), jnp.bfloat16)
    assert 'blocks' in reason(many, many, many)
    monkeypatch.setattr(platform, 'sequence_shards', lambda: 2)
    part, whole = example(256)[0], example(512)[1]
    assert reason(part, whole, whole, q_offset=jnp.int32(0)) is None
    assert 'multiples of 256' in reason(part[:, :150], whole[:, :300], whole[:, :300])


def test_tpus_get_the_kernel(monkeypatch):
    call = PolynomialCall(*example(8)[:3], degree=4)
    for target, module in (('tpu', polynomial), ('cpu', xla), ('gpu', xla)):
        monkeypatch.setattr(platform, 'target_platform', lambda target=target: target)
        assert exact_attention.POLYNOMIAL.choose(None, call) is module


def test_wide_heads_go_to_splash_and_all_else_to_our_kernels(monkeypatch):
    call = SoftmaxCall(*example(8)[:3], scale=1.0)
    monkeypatch.setattr(platform, 'target_platform', lambda: 'tpu')
    monkeypatch.setattr(platform.LOG, 'warning', lambda message: pytest.fail(message))
    choose = exact_attention.SOFTMAX.choose
    assert choose(None, call) is softmax
    assert choose(None, dataclasses.replace(call, window=4, sinks_H=jnp.zeros(1), score_cap=1.0)) is softmax
    wide = SoftmaxCall(*example(8, size=256)[:3], scale=1.0, window=4, score_cap=1.0)
    assert choose(None, wide) is splash


@pytest.mark.parametrize('degree', [1, 2, 4, 6, 8, 10, 12, 14, 16])
def test_powers_by_squaring(degree):
    s = jnp.linspace(-2.0, 2.0, 9)
    power, slope = power_and_slope(s, degree)
    np.testing.assert_allclose(power, np.asarray(s, np.float64) ** degree, rtol=1e-6)
    if degree == 1:
        assert slope is None
    else:
        np.testing.assert_allclose(slope, np.asarray(s, np.float64) ** (degree - 1), rtol=1e-6)


@pytest.mark.slow
@both
@pytest.mark.parametrize(
    ('generation', 'length', 'kv_heads', 'documents'),
    [
        ('v5e:2x2', 300, 2, True),
        ('v5e:2x2', 8192, 4, False),
        ('v5e:2x2', 131072, 4, True),
        ('v4:2x2x1', 32768, 1, True),
        ('v6e:2x2', 2048, 1, False),
    ],
)
def test_compiles_for_a_tpu_in_linear_memory(generation, length, kv_heads, documents, rule, monkeypatch):
    """The test compiles forward and backward for a mesh of four chips, on a machine without any."""
    if importlib.util.find_spec('libtpu') is None:
        pytest.skip('libtpu is not installed')
    for name, value in LIBTPU_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    from jax.experimental import topologies

    settings = {'chip_config_name': 'megacore'} if generation.startswith('v4') else {}
    topology = topologies.get_topology_desc(platform='tpu', topology_name=generation, **settings)
    mesh = topologies.make_mesh(topology, (4,), ('data',))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))
    q, k = (jax.ShapeDtypeStruct((4, length, h, 64), jnp.bfloat16, sharding=rows) for h in (4, kv_heads))

    starts = jax.ShapeDtypeStruct((4, length), jnp.int32, sharding=rows) if documents else None

    def gradients(q, k, v, starts):
        attention = exact_attention.polynomial_attention if 'degree' in rule else exact_attention.softmax_attention
        attention = functools.partial(attention, **rule, starts_BxL=starts)
        return jax.grad(lambda *x: attention(*x).astype(jnp.float32).sum(), (0, 1, 2))(q, k, v)

    with jax.set_mesh(mesh):
        compiled = jax.jit(gradients).trace(q, k, k, starts).lower(lowering_platforms=('tpu',)).compile()
    text = compiled.as_text()
    assert 'flash_attention_backward' in text
    assert not any(name in text for name in ('all-reduce', 'all-gather', 'all-to-all'))
    # The layouts of operands and gradients change, and sums are float32: at most 2 KiB per token and head.
    assert compiled.memory_analysis().temp_size_in_bytes <= 2048 * 4 * max(length, 1024)


@pytest.mark.slow
@both
@pytest.mark.parametrize('generation', ['v4:2x2x1', 'v5e:2x2', 'v5p:2x2x1', 'v6e:2x2', 'v7x:2x2x1'])
def test_parts_of_a_window_compile_for_every_generation(generation, rule):
    """The windows have documents, whose starts travel with the queries. On v5e there are enough blocks for two backward
    sweeps."""
    if importlib.util.find_spec('libtpu') is None:
        pytest.skip('libtpu is not installed')
    devices = describe_devices(parse(generation))
    parts, length = len(devices), 2**19 if 'v5e' in generation else 2**14
    mesh = jax.sharding.Mesh(np.array(devices).reshape(1, parts), ('data', 'sequence'))
    tokens = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, 'sequence'))
    x = jax.ShapeDtypeStruct((1, length, 2, 64), jnp.bfloat16, sharding=tokens)
    starts = jax.ShapeDtypeStruct((1, length), jnp.int32, sharding=tokens)

    def gradients(q, k, v, starts):
        operation = exact_attention.polynomial_attention if 'degree' in rule else exact_attention.softmax_attention

        def of_part(q, k, v, starts):
            return operation(q, k, v, **rule, starts_BxL=starts)

        split = sequence.over_tokens(of_part, (1, 1, 1, 1))
        return jax.grad(lambda *x: split(*x, starts).astype(jnp.float32).sum(), (0, 1, 2))(q, k, v)

    with jax.set_mesh(mesh):
        lowered = jax.jit(gradients).trace(x, x, x, starts).lower(lowering_platforms=('tpu',))
        lowered.compile()
    assert lowered.as_text().count('kernel_name = "flash_attention_backward"') == (2 if 'v5e' in generation else 1)


@pytest.mark.slow
@pytest.mark.parametrize('generation', ['v4:2x2x1', 'v5e:2x2', 'v5p:2x2x1', 'v6e:2x2', 'v7x:2x2x1'])
def test_windows_with_sinks_and_caps_compile_for_every_generation(generation):
    """There are whole windows, and parts with the keys before them."""
    if importlib.util.find_spec('libtpu') is None:
        pytest.skip('libtpu is not installed')
    devices = describe_devices(parse(generation))
    tokens = jax.sharding.PartitionSpec(None, 'sequence')
    for parts in (1, len(devices)):
        mesh = jax.sharding.Mesh(np.array(devices[:parts]).reshape(1, parts), ('data', 'sequence'))
        split = jax.sharding.NamedSharding(mesh, tokens)
        x = jax.ShapeDtypeStruct((1, 8192, 2, 64), jnp.bfloat16, sharding=split)
        starts = jax.ShapeDtypeStruct((1, 8192), jnp.int32, sharding=split)
        sinks = jax.ShapeDtypeStruct((2,), jnp.float32, sharding=jax.sharding.NamedSharding(mesh, jax.P()))

        def gradients(q, k, v, sinks, starts):
            def of_part(q, k, v, sinks, starts):
                options = dict(window=700, score_cap=50.0, implementation='pallas_tpu')
                return exact_attention.softmax_attention(q, k, v, sinks_H=sinks, starts_BxL=starts, **options)

            attention = sequence.over_tokens(of_part, (1, 1, 1, None, 1))
            return jax.grad(lambda *a: attention(*a, starts).astype(jnp.float32).sum(), (0, 1, 2, 3))(q, k, v, sinks)

        with jax.set_mesh(mesh):
            jax.jit(gradients).trace(x, x, x, sinks, starts).lower(lowering_platforms=('tpu',)).compile()
