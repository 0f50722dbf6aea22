"""Rotation and normalizations of queries and keys: XLA and the TPU kernels, interpreted on the CPU."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import interpret_kernels

from lm.hardware import describe_devices, parse
from lm.model.positions import rotary
from lm.ops import rotary as op
from lm.ops.errors import OperationError
from lm.ops.rotary import reference, tpu, xla

pytestmark = pytest.mark.usefixtures('no_races')


def example(
    length, *, batch=2, heads=2, keys=1, size=32, own=False, rotated=True, normed=True, rooted=False, dtype='float32',
    out=None,
):  # fmt: skip
    """Returns the arguments of `rotate` without the number of heads, and gradients of its results.

    `own`: each row has its own positions; `rooted`: root-mean-square normalizations come first.
    """
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    positions = jnp.asarray(rng.integers(0, 9000, (batch, length) if own else (length,)))
    norms = op.HeadNorms(1 + 0.3 * draw(size), 0.3 * draw(size), 1 + 0.3 * draw(size), 0.3 * draw(size), out)
    qk = (0.5 + 2 * draw(batch, length, heads + keys, size)).astype(dtype)
    cotangents = tuple(draw(batch, length, n, size).astype(out or dtype) for n in (heads, keys))
    roots = op.RootNorms(1 + 0.3 * draw(size), 1 + 0.3 * draw(size), 0.1) if rooted else None
    return (qk, rotary(positions, size) if rotated else None, norms if normed else None, roots), cotangents


def outputs_and_gradients(function, arrays, cotangents):
    qk, rotation, *norms = arrays
    heads = cotangents[0].shape[2]

    def both(qk, norms, cotangents):
        results, vjp = jax.vjp(lambda qk, norms: function(op.RotaryCall(qk, rotation, heads, *norms)), qk, norms)
        return results, vjp(tuple(cotangents))

    return jax.jit(both)(qk, norms, cotangents)


def by_definition(arrays, cotangents):
    """Computes in float64, from the same rounded inputs."""
    (qk, rotation, norms, roots), wide = arrays, lambda a: jnp.asarray(np.asarray(a, np.float64))
    with jax.enable_x64(True):
        norms = None if norms is None else op.HeadNorms(*map(wide, jax.tree.leaves(norms)))
        given = jax.tree.map(wide, ((qk, rotation, norms, roots), cotangents))
        found = outputs_and_gradients(reference.rotate, *given)
        return [np.asarray(a) for a in jax.tree.leaves(found)]


def by_kernels(arrays, cotangents):
    with interpret_kernels():
        return outputs_and_gradients(tpu.rotate, arrays, cotangents)


def largest(got, want) -> float:
    """Returns the largest relative error of all arrays; NaN if an array has one."""
    pairs = zip(jax.tree.leaves(got), want, strict=True)
    found = [np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b) for a, b in pairs]
    return float(np.max(found))


CASES = {
    'both': {'length': 128},
    'rotated alone': {'length': 256, 'normed': False},
    'normalized alone': {'length': 256, 'rotated': False},
    'rows with positions': {'length': 256, 'own': True},
    'several steps': {'length': 1280, 'heads': 3, 'keys': 3},
    'heads of 64': {'length': 128, 'heads': 4, 'keys': 2, 'size': 64, 'batch': 1},
    'divided by roots': {'length': 256, 'normed': False, 'rooted': True},
    'roots alone': {'length': 128, 'rotated': False, 'normed': False, 'rooted': True},
    'all three': {'length': 256, 'own': True, 'rooted': True},
}


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('case', CASES)
def test_kernels(case, dtype):
    given = example(**CASES[case], dtype=dtype)
    assert largest(by_kernels(*given), by_definition(*given)) <= (2e-6 if dtype == 'float32' else 5e-3)


@pytest.mark.parametrize('case', [*CASES, 'odd'])
def test_xla(case):
    given = example(**({'length': 45} if case == 'odd' else CASES[case]))
    assert largest(outputs_and_gradients(xla.rotate, *given), by_definition(*given)) <= 2e-6


@pytest.mark.parametrize('function', [by_kernels, lambda *given: outputs_and_gradients(xla.rotate, *given)])
def test_results_can_be_wider_than_the_inputs(function):
    """Powers of the vectors need results in float32."""
    given = example(128, dtype='bfloat16', out=jnp.float32)
    found = function(*given)
    assert [a.dtype for a in jax.tree.leaves(found[:1])] == [jnp.float32] * 2
    assert found[1][0].dtype == jnp.bfloat16
    assert largest(found, by_definition(*given)) <= 5e-3


def test_calls_without_rotation_and_norm_change_nothing():
    (qk, *_), _ = example(8)
    q, k = op.rotate(qk, None, 2)
    np.testing.assert_array_equal(jnp.concatenate([q, k], axis=2), qk)


def test_batch_split_over_a_mesh():
    arrays, cotangents = example(128, batch=4, own=True, rooted=True)
    want = by_definition(arrays, cotangents)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ('data', 'fsdp'))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(('data', 'fsdp')))
    with jax.set_mesh(mesh), interpret_kernels():
        placed = jax.device_put((arrays[:2], cotangents), rows)
        got = outputs_and_gradients(tpu.rotate, (*placed[0], *arrays[2:]), placed[1])
    assert all(x.sharding.is_equivalent_to(rows, x.ndim) for x in got[0])
    assert largest(got, want) <= 2e-6


REFUSED = {
    'heads whose size': {'size': 48},
    'a multiple of 128 tokens': {'length': 100},
    'all bfloat16 or all float32': {'dtype': jnp.float16},
    'VMEM': {'heads': 200, 'keys': 200, 'size': 128, 'batch': 1},
}


@pytest.mark.parametrize('reason', REFUSED)
def test_unsupported_calls_say_why(reason, monkeypatch):
    monkeypatch.setattr(tpu.platform, 'target_platform', lambda: 'tpu')
    qk, rotation, norms, _ = example(256)[0]
    assert tpu.unsupported(op.RotaryCall(qk, rotation, 2, norms)) is None
    (qk, rotation, norms, _), _ = example(**{'length': 256} | REFUSED[reason])
    assert reason in tpu.unsupported(op.RotaryCall(qk, rotation, 2, norms))
    with pytest.raises(OperationError, match=reason):
        op.rotate(qk, rotation, 2, norms, implementation='pallas_tpu')


@pytest.mark.slow
@pytest.mark.parametrize('generation', ['v4:2x2x1', 'v5e:2x2', 'v6e:2x2'])
@pytest.mark.parametrize(('heads', 'size', 'dtype'), [(10, 256, 'float32'), (10, 256, 'bfloat16'), (40, 64, 'float32')])
def test_compiles_for_tpus_at_the_edge_of_their_memory(heads, size, dtype, generation):
    """The test compiles forward and backward for a mesh of four chips."""
    if importlib.util.find_spec('libtpu') is None:
        pytest.skip('libtpu is not installed')
    devices = describe_devices(parse(generation))
    mesh = jax.sharding.Mesh(np.array(devices), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
    arrays, cotangents = example(1536, batch=4, heads=heads - 2, keys=2, size=size, rooted=True, dtype=dtype)
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))

    def describe(a):
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=rows if a.ndim == 4 else None)

    def both(qk, rotation, norms, roots, cotangents):
        assert tpu.unsupported(op.RotaryCall(qk, rotation, heads - 2, norms, roots)) is None
        return outputs_and_gradients(tpu.rotate, (qk, rotation, norms, roots), cotangents)

    with jax.set_mesh(mesh):
        lowered = jax.jit(both).trace(*jax.tree.map(describe, (*arrays, cotangents))).lower(lowering_platforms=('tpu',))
        assert 'rotary_backward' in lowered.compile().as_text()
