"""Chunked cross-entropy against a float64 numpy formula: values, gradients, memory, split batches."""

import functools
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.cost_model.program import HloProgram
from lm.cost_model.traffic import hbm_bytes
from lm.hardware import describe_devices, parse
from lm.ops import platform
from lm.ops.cross_entropy import cross_entropy, weighted_cross_entropy
from lm.ops.errors import OperationError

VOCABULARY, SIZE = 53, 16


def draw(batch, length, dtype=np.float32, bias=True):
    rng = np.random.default_rng(length)
    x = jnp.asarray(rng.normal(size=(batch, length, SIZE)), dtype)
    embedding = jnp.asarray(rng.normal(size=(VOCABULARY, SIZE)), np.float32)
    bias = jnp.asarray(rng.normal(size=VOCABULARY), np.float32) if bias else None
    return x, embedding, bias, jnp.asarray(rng.integers(0, VOCABULARY, (batch, length)))


def numpy_nats_and_gradients(x, embedding, bias, targets):
    """Computes nats, and the gradients for the cotangent cos(index), in float64."""
    x, embedding = np.asarray(x, np.float64), np.asarray(embedding, np.float64)
    logits = x @ embedding.T + (0 if bias is None else np.asarray(bias, np.float64))
    weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    onehot = np.eye(VOCABULARY)[np.asarray(targets)]
    dlogits = (weights - onehot) * np.cos(np.arange(targets.size)).reshape(*targets.shape, 1)
    nats = -np.log((weights * onehot).sum(-1))
    return nats, dlogits @ embedding, np.einsum('blv,bld->vd', dlogits, x), dlogits.sum((0, 1))


@functools.partial(jax.jit, static_argnums=0)
def values_and_gradients(loss, x, embedding, bias, targets):
    nats, pull = jax.vjp(lambda *a: loss(*a, targets), x, embedding, bias)
    return nats, *pull(jnp.cos(jnp.arange(targets.size, dtype=jnp.float32)).reshape(targets.shape))


def assert_close(got, expected, tolerance):
    for name, g, e in zip(('nats', 'dx', 'dembedding', 'dbias'), got, expected, strict=True):
        if g is not None:
            error = np.abs(np.asarray(g, np.float64) - e).max() / np.abs(e).max()
            assert error <= tolerance, f'{name}: {error:.2e}'


@pytest.mark.parametrize('implementation', ['xla', 'reference'])
@pytest.mark.parametrize('bias', [True, False])
@pytest.mark.parametrize(('batch', 'length', 'chunk'), [(1, 1, None), (2, 24, 8), (3, 29, 8), (2, 100, 33), (2, 9, 1)])
def test_agrees_with_float64(batch, length, chunk, bias, implementation):
    arguments = draw(batch, length, bias=bias)
    got = values_and_gradients(functools.partial(cross_entropy, chunk=chunk, implementation=implementation), *arguments)
    assert got[0].dtype == jnp.float32
    assert_close(got, numpy_nats_and_gradients(*arguments), 1e-5)


@pytest.mark.parametrize('beyond', [-100.0, -88.0, -70.0, 80.0, 100.0])
@pytest.mark.parametrize('everywhere', [True, False])
def test_sums_of_exponentials_beyond_float32_stay_finite(beyond, everywhere):
    x, embedding, bias, targets = draw(2, 24)
    if everywhere:
        bias = bias + beyond
    else:  # the logits of three tokens, two of one chunk, are as large
        direction = embedding[0] / jnp.linalg.norm(embedding[0])
        embedding = embedding + direction
        x = x.at[jnp.array([0, 0, 1]), jnp.array([3, 5, 20])].add(beyond * direction)
    got = values_and_gradients(functools.partial(cross_entropy, chunk=8), x, embedding, bias, targets)
    assert_close(got, numpy_nats_and_gradients(x, embedding, bias, targets), 1e-4)


def test_a_token_that_is_not_finite_spoils_no_other():
    x, embedding, bias, targets = draw(2, 24)
    want = cross_entropy(x, embedding, bias, targets, chunk=8)
    got = cross_entropy(x.at[0, 3].set(jnp.nan), embedding, bias, targets, chunk=8)
    assert jnp.isnan(got[0, 3])
    np.testing.assert_allclose(got.at[0, 3].set(0.0), want.at[0, 3].set(0.0), rtol=1e-6)


def numpy_capped(x, embedding, bias, targets, cap):
    """Computes nats, log-normalizers, and their gradients for the cotangents cos(index) and sin(index), in float64."""
    x, embedding = np.asarray(x, np.float64), np.asarray(embedding, np.float64)
    raw = x @ embedding.T + (0 if bias is None else np.asarray(bias, np.float64))
    logits, slope = (raw, 1.0) if cap is None else (cap * np.tanh(raw / cap), 1 / np.cosh(raw / cap) ** 2)
    total = np.log(np.exp(logits).sum(-1))
    onehot = np.eye(VOCABULARY)[np.asarray(targets)]
    weights, index = np.exp(logits - total[..., None]), np.arange(targets.size).reshape(*targets.shape, 1)
    dlogits = ((weights - onehot) * np.cos(index) + weights * np.sin(index)) * slope
    nats = total - (logits * onehot).sum(-1)
    return nats, total, dlogits @ embedding, np.einsum('blv,bld->vd', dlogits, x), dlogits.sum((0, 1))


@functools.partial(jax.jit, static_argnums=0)
def both_and_gradients(loss, x, embedding, bias, targets):
    index = jnp.arange(targets.size, dtype=jnp.float32).reshape(targets.shape)
    (nats, total), pull = jax.vjp(lambda *a: loss(*a, targets, normalizer=True), x, embedding, bias)
    return nats, total, *pull((jnp.cos(index), jnp.sin(index)))


@pytest.mark.parametrize('implementation', ['xla', 'reference'])
@pytest.mark.parametrize('cap', [None, 3.0])
@pytest.mark.parametrize(('length', 'chunk', 'bias'), [(24, 8, True), (29, 8, False)])
def test_cap_and_normalizer_agree_with_float64(length, chunk, bias, cap, implementation):
    arguments = draw(2, length, bias=bias)
    loss = functools.partial(cross_entropy, cap=cap, chunk=chunk, implementation=implementation)
    got, expected = both_and_gradients(loss, *arguments), numpy_capped(*arguments, cap)
    for g, e in zip(got, expected, strict=True):
        if g is not None:
            np.testing.assert_allclose(g, e, rtol=0, atol=2e-5 * np.abs(e).max())
    np.testing.assert_allclose(got[0], jax.jit(loss)(*arguments), rtol=0, atol=1e-5)  # of another program


def test_capped_logits_of_any_size_have_finite_gradients():
    x, embedding, bias, targets = draw(1, 8)
    got = both_and_gradients(functools.partial(cross_entropy, cap=30.0, chunk=4), 1e4 * x, embedding, bias, targets)
    assert all(np.isfinite(g).all() for g in got)
    assert got[0].max() <= 60 + np.log(VOCABULARY)


def numpy_weighted(x, embedding, bias, targets, weights, cap, z_loss):
    """Computes the weighted sum, its nats and its gradients, in float64."""
    x, embedding = np.asarray(x, np.float64), np.asarray(embedding, np.float64)
    weights = np.asarray(weights, np.float64)
    raw = x @ embedding.T + (0 if bias is None else np.asarray(bias, np.float64))
    logits, slope = (raw, 1.0) if cap is None else (cap * np.tanh(raw / cap), 1 / np.cosh(raw / cap) ** 2)
    total = np.log(np.exp(logits).sum(-1))
    onehot = np.eye(VOCABULARY)[np.asarray(targets)]
    nats, shares = total - (logits * onehot).sum(-1), np.exp(logits - total[..., None])
    dlogits = (shares - onehot + 2 * z_loss * (total[..., None] * shares)) * weights[..., None] * slope
    losses = nats + z_loss * total**2
    return (
        (weights * losses).sum(),
        nats,
        *(dlogits @ embedding, np.einsum('blv,bld->vd', dlogits, x), dlogits.sum((0, 1)), losses),
    )


@functools.partial(jax.jit, static_argnums=0)
def weighted_and_gradients(loss, x, embedding, bias, targets, weights):
    """Takes the gradients of 3 times the sum, to have a cotangent other than 1."""

    def threefold(x, embedding, bias, weights):
        parts, nats = loss(x, embedding, bias, targets, weights)
        return 3.0 * parts.sum() + nats.sum(), nats  # no gradient flows to the nats

    arguments = (0, 1, 3) if bias is None else (0, 1, 2, 3)
    (_, nats), found = jax.value_and_grad(threefold, arguments, has_aux=True)(x, embedding, bias, weights)
    dx, dembedding, *dbias, dweights = (g / 3 for g in found)
    sums, _ = loss(x, embedding, bias, targets, weights)
    return sums.sum(), nats, dx, dembedding, *(dbias or [None]), dweights


WEIGHTED = [(1, 1, None, True), (2, 24, 8, True), (3, 29, 8, False), (2, 100, 33, True), (2, 9, 1, False)]


@pytest.mark.parametrize('implementation', ['xla', 'reference'])
@pytest.mark.parametrize(('cap', 'z_loss'), [(None, 0.0), (3.0, 0.1)])
@pytest.mark.parametrize(('batch', 'length', 'chunk', 'bias'), WEIGHTED)
def test_weighted_sum_agrees_with_float64(batch, length, chunk, bias, cap, z_loss, implementation):
    arguments = (*draw(batch, length, bias=bias), jnp.asarray(np.random.default_rng(1).normal(size=(batch, length))))
    options = {'cap': cap, 'z_loss': z_loss}
    loss = functools.partial(weighted_cross_entropy, **options, chunk=chunk, implementation=implementation)
    got, expected = weighted_and_gradients(loss, *arguments), numpy_weighted(*arguments, **options)
    for g, e in zip(got, expected, strict=True):
        if g is not None:
            np.testing.assert_allclose(g, e, rtol=0, atol=2e-5 * np.abs(e).max())


def test_weighted_sum_with_bfloat16_activations():
    arguments = draw(2, 100, jnp.bfloat16)
    arguments += (jnp.full(arguments[3].shape, 1 / arguments[3].size),)
    got = weighted_and_gradients(functools.partial(weighted_cross_entropy, chunk=16), *arguments)
    assert [g.dtype for g in got[:5]] == [jnp.float32, jnp.float32, jnp.bfloat16, jnp.float32, jnp.float32]
    for g, e in zip(got, numpy_weighted(*arguments, None, 0.0), strict=True):
        np.testing.assert_allclose(np.asarray(g, np.float64), e, rtol=0, atol=2e-2 * np.abs(e).max())


def test_weighted_sum_takes_three_products():
    x, embedding, _, targets = draw(2, 24)
    weights = jnp.ones(targets.shape)

    def products(loss):
        text = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, embedding))
        return text.count('dot_general')

    assert products(lambda x, e: weighted_cross_entropy(x, e, None, targets, weights, chunk=8)[0].sum()) == 3
    assert products(lambda x, e: cross_entropy(x, e, None, targets, chunk=8).sum()) == 4


def test_tpus_compute_the_gradients_of_logits_for_each_product(monkeypatch):
    arguments = (*draw(2, 29), jnp.cos(jnp.arange(58.0)).reshape(2, 29))
    loss = functools.partial(weighted_cross_entropy, z_loss=0.1, chunk=8)
    want = weighted_and_gradients(loss, *arguments)
    monkeypatch.setattr(platform, 'target_platform', lambda: 'tpu')
    got = weighted_and_gradients(functools.partial(loss), *arguments)
    for g, e in zip(got, want, strict=True):
        np.testing.assert_allclose(g, e, rtol=0, atol=1e-6 * np.abs(e).max())


@pytest.mark.parametrize('generation', ['v5e:2x2', 'v6e:2x2'])
def test_tpus_write_logits_once_and_read_them_twice(generation):
    """The logits are float32, and only three products read or write them."""
    if importlib.util.find_spec('libtpu') is None:
        pytest.skip('libtpu is not installed')
    mesh = jax.sharding.Mesh(np.array(describe_devices(parse(generation))[:1]), ('data',))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    length, vocabulary, size = 8192, 32_000, 128
    shapes = [(1, length, size), (vocabulary, size), (1, length), (1, length)]
    dtypes = [jnp.bfloat16, jnp.float32, jnp.int32, jnp.float32]
    given = [jax.ShapeDtypeStruct(*each, sharding=whole) for each in zip(shapes, dtypes, strict=True)]

    def loss(x, embedding, targets, weights):
        return weighted_cross_entropy(x, embedding, None, targets, weights)[0].sum()

    with jax.set_mesh(mesh):
        text = jax.jit(jax.grad(loss, (0, 1))).lower(*given).compile().as_text()
    logits = length * vocabulary * 4
    assert 3.0 * logits < hbm_bytes(HloProgram(text)) < 3.3 * logits


def test_bfloat16_activations():
    x, embedding, bias, targets = draw(2, 100, jnp.bfloat16)
    got = values_and_gradients(functools.partial(cross_entropy, chunk=16), x, embedding, bias, targets)
    assert [g.dtype for g in got] == [jnp.float32, jnp.bfloat16, jnp.float32, jnp.float32]
    assert_close(got, numpy_nats_and_gradients(x, embedding, bias, targets), 2e-2)


def test_certain_and_hopeless_predictions_stay_finite():
    x, embedding, bias, targets = draw(1, 8)
    got = values_and_gradients(functools.partial(cross_entropy, chunk=4), 1e4 * x, embedding, bias, targets)
    assert all(np.isfinite(g).all() for g in got)
    assert got[0].max() > 1e4


def test_an_id_outside_the_vocabulary_gives_nan():
    x, embedding, bias, targets = draw(1, 8)
    nats = cross_entropy(x, embedding, bias, targets.at[0, 3].set(VOCABULARY))
    assert np.isnan(nats[0, 3])
    assert np.isfinite(np.delete(nats[0], 3)).all()


@pytest.mark.parametrize('batch', [8, 6])
def test_a_split_batch_gives_the_same(batch):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ('data', 'fsdp'))
    arguments = draw(batch, 29)
    loss = functools.partial(cross_entropy, chunk=8)
    weighted, weights = functools.partial(weighted_cross_entropy, z_loss=0.1, chunk=8), jnp.cos(1.0 * arguments[3])
    alone, both = values_and_gradients(loss, *arguments), both_and_gradients(loss, *arguments)
    with jax.set_mesh(mesh):
        together = values_and_gradients(loss, *arguments)
        both_together = both_and_gradients(loss, *arguments)
        weighted_together = weighted_and_gradients(weighted, *arguments, weights)
    assert_close(together, [np.asarray(a, np.float64) for a in alone], 1e-6)
    for got, expected in zip(weighted_together, weighted_and_gradients(weighted, *arguments, weights), strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=5e-6 * np.abs(expected).max())
    np.testing.assert_allclose(both_together[1], both[1], rtol=1e-6)
    assert_close(
        (both_together[0], *both_together[2:]), [np.asarray(a, np.float64) for a in (both[0], *both[2:])], 1e-6
    )


def test_split_devices_communicate_only_at_the_end():
    """There is one reduction of the gradient, and not one per chunk."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ('data',))
    x, embedding, _, targets = draw(8, 64)
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    gradient = jax.grad(lambda x, e, t: cross_entropy(x, e, None, t, chunk=8).sum(), (0, 1))
    with jax.set_mesh(mesh):
        compiled = jax.jit(gradient, in_shardings=(rows, whole, rows), out_shardings=(rows, whole))
        text = compiled.lower(x, embedding, targets).compile().as_text()
    # The text has one computation per paragraph. The `while` instructions name the loops over the chunks.
    loops = {name: text.split(f'\n%{name} ')[1].split('\n}')[0] for name in re.findall(r'body=%([\w.\-]+)', text)}
    assert len(loops) == 2
    assert text.count(' all-reduce(') == 1
    assert not [name for name, body in loops.items() if 'all-reduce' in body or 'all-gather' in body]
    assert 'all-gather' not in text


def test_logits_never_exist_whole():
    batch, length, vocabulary, size = 2, 4096, 8192, 64
    shapes = [(batch, length, size), (vocabulary, size), (vocabulary,)]
    x, embedding, bias = (jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)
    targets = jax.ShapeDtypeStruct((batch, length), jnp.int32)

    def squares(*arguments):
        nats, total = cross_entropy(*arguments, cap=30.0, normalizer=True)
        return (nats + total**2).sum()

    for loss in (lambda *a: cross_entropy(*a).sum(), squares):
        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, embedding, bias, targets).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < batch * length * vocabulary * 4 / 4


def test_an_unknown_implementation_is_named():
    with pytest.raises(OperationError, match='cross-entropy has only reference, xla'):
        cross_entropy(*draw(1, 4), implementation='fused')
