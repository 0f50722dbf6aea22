"""The GPU kernels of the delta rule, without a GPU; `test_pallas_gpu` explains how."""

import grids
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_pallas_gpu import H200, can_compile, interpreted, interpreter
from test_pallas_tpu import quick

from lm.ops import platform
from lm.ops.delta_rule import IMPLEMENTATIONS, DeltaCall, DeltaResult, delta_rule
from lm.ops.delta_rule.gpu import rule

NAMES = ('o', 'state', 'dq', 'dk', 'dv', 'dbeta', 'dlog_decay', 'dinitial_state')
CASES = {
    'without factors': {'length': 130, 'decay': False},
    'factors and resets': {'length': 150},
    'odd sizes, grouped, negative': {'length': 140, 'heads': (4, 2), 'sizes': (40, 48), 'beta': 2.0},
    'values twice as wide': {'length': 140, 'heads': (4, 2), 'sizes': (32, 64)},
    'less than a chunk': {'length': 20},
    'parts of keys and values': {'length': 70, 'heads': (2, 1), 'sizes': (100, 180)},
}


def example(length, *, heads=(1, 1), sizes=(64, 64), beta=1.0, decay=True, one_key=False):
    """Returns the arguments of an implementation, and gradients of its results."""
    keys = jax.random.split(jax.random.key(0), 8)
    (n, kv), (e, d) = heads, sizes
    shapes = [(n, e), (kv, e), (kv, d), (n, d)]
    q, k, v, do = (jax.random.normal(key, (1, length, *s)) for key, s in zip(keys[:4], shapes, strict=True))
    k = jnp.broadcast_to(k[:, :1], k.shape) if one_key else k
    beta = beta * (1.0 if one_key else jax.nn.sigmoid(jax.random.normal(keys[4], (1, length, kv))))
    logs = -jax.nn.softplus(jax.random.normal(keys[5], (1, length, kv)) - 2)
    logs = logs.at[:, 17].set(-jnp.inf).at[:, 80:82].set(-jnp.inf) if decay else None
    state, dstate = (jax.random.normal(key, (1, kv, e, d)) for key in keys[6:])
    wide = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    return [*wide, jnp.broadcast_to(beta, (1, length, kv)), logs, state], (do.astype(jnp.bfloat16), dstate)


def results(implementation, dtype=jnp.bfloat16):
    """Returns outputs, the last state and all gradients."""

    def function(arrays, cotangents):
        arrays = [x if x is None or x.dtype == jnp.float32 else x.astype(dtype) for x in arrays]
        rule = IMPLEMENTATIONS[implementation].delta_rule
        (o, state), vjp = jax.vjp(lambda *a: rule(DeltaCall(*a, query_length=1.0)), *arrays)
        do, dstate = cotangents
        return [o, state, *vjp(DeltaResult(do.astype(o.dtype), dstate))]

    return function


def errors(got, want, names=NAMES) -> dict[str, float]:
    """Returns relative errors by name."""
    triples = zip(names, got, want, strict=True)
    return {
        n: float(np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b))
        for n, a, b in triples
        if b is not None
    }


@pytest.mark.smoke  # on Python 3.12 pip has a JAX that can interpret it
@interpreter
@pytest.mark.parametrize('name', grids.draw(CASES, 3))
def test_agrees_with_the_recurrence(name):
    arrays, cotangents = example(**CASES[name])
    with interpreted():
        got = quick(results('pallas_gpu'))(arrays, cotangents)
    found = errors(got, results('reference', jnp.float32)(arrays, cotangents))
    assert all(error <= 1e-2 for error in found.values()), found


@interpreter
def test_a_repeated_key_stays_exact():
    arrays, cotangents = example(128, decay=False, one_key=True)
    with interpreted():
        got = quick(results('pallas_gpu'))(arrays, cotangents)
    found = errors(got, results('reference', jnp.float32)(arrays, cotangents))
    assert all(error <= 3e-2 for error in found.values()), found


@interpreter
@pytest.mark.parametrize('kind', ['random', 'one key', 'one key, negative'])
def test_systems_are_solved_like_the_inverse_in_float64(kind):
    """Powers of a system with one key reach 10^18; its inverse stays at 1 (or 2)."""
    from lm.ops.delta_rule.gpu.systems import solve, solve_transposed

    rng, shape = np.random.default_rng(0), (1, 2, 64, 64)
    k, v, du, dw = (rng.standard_normal(shape) for _ in range(4))
    k = (k if kind == 'random' else np.broadcast_to(k[:, :, :1], shape)) / np.linalg.norm(k, axis=-1, keepdims=True)
    if kind == 'random':
        beta, t = rng.uniform(size=shape[:3]), np.cumsum(-rng.exponential(0.1, shape[:3]), axis=-1)
    else:
        beta, t = np.full(shape[:3], 1.0 if kind == 'one key' else 2.0), np.zeros(shape[:3])
    k, v, du, dw = (jnp.asarray(a, jnp.bfloat16) for a in (k, v, du, dw))
    with interpreted():
        beta_t = jnp.asarray(beta, jnp.float32), jnp.asarray(t, jnp.float32)
        got = quick(lambda: [*solve(k, *beta_t, v), *solve_transposed(k, *beta_t, du, dw)])()
    k, v, du, dw = (np.asarray(a, np.float64) for a in (k, v, du, dw))
    between = np.minimum(t[..., :, None] - t[..., None, :], 0.0)
    x = np.linalg.inv(np.eye(64) + np.tril(beta[..., None] * (k @ k.swapaxes(2, 3)) * np.exp(between), -1))
    want = [x @ (v * beta[..., None]), -x @ (k * (beta * np.exp(t))[..., None])]
    want += [x.swapaxes(2, 3) @ d for d in (du, dw)]
    for a, b in zip(got, want, strict=True):
        assert np.linalg.norm(np.asarray(a, np.float64) - b) <= 1e-2 * np.linalg.norm(b)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(platform, 'target_platform', lambda: 'gpu')
    monkeypatch.setattr(platform, 'device_kind', lambda: 'NVIDIA H100 80GB HBM3')
    monkeypatch.setattr(platform, 'MOSAIC_GPU_JAX', (0, 1))


def test_hoppers_get_the_kernels_and_other_calls_are_refused(hopper, monkeypatch):
    arrays, _ = example(100)
    call = DeltaCall(*arrays)
    assert IMPLEMENTATIONS.choose(None, call) is rule
    wide = DeltaCall(*example(100, sizes=(128, 128))[0])
    monkeypatch.setattr(platform, 'read_shown', lambda: {'the delta rule: pallas_gpu': 'a row'})
    assert IMPLEMENTATIONS.choose(None, wide) is IMPLEMENTATIONS['xla']
    assert IMPLEMENTATIONS.choose('pallas_gpu', wide) is rule
    monkeypatch.setattr(platform, 'read_shown', lambda: {'the delta rule: pallas_gpu (wide heads)': 'a row'})
    assert IMPLEMENTATIONS.choose(None, wide) is rule
    assert IMPLEMENTATIONS.choose(None, call) is IMPLEMENTATIONS['xla']
    assert 'bfloat16, not float32' in rule.unsupported(DeltaCall(arrays[0].astype(jnp.float32), *arrays[1:]))
    for sizes in ((129, 64), (64, 257)):
        assert 'keys of up to 128 and values of up to 256' in rule.unsupported(DeltaCall(*example(100, sizes=sizes)[0]))
    monkeypatch.setattr(platform, 'device_kind', lambda: 'NVIDIA A100-SXM4-80GB')
    assert IMPLEMENTATIONS.choose(None, call) is IMPLEMENTATIONS['xla']


@pytest.mark.skipif(not can_compile(), reason="needs JAX's CUDA plugin and ptxas")
@pytest.mark.parametrize(('decay', 'sizes'), [(True, (64, 64)), (False, (64, 64)), (True, (128, 256))])
def test_compiles_for_an_h200(decay, sizes):
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(topology_name='h200', platform='cuda', target_config=H200, topology='1x1x1')
    mesh = jax.sharding.Mesh(np.array(topology.devices), ('data',))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    arrays = [x for x in example(1000, heads=(4, 2), sizes=sizes, decay=decay)[0][:5] if x is not None]
    arrays = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=replicated) for a in arrays]

    def loss(*arrays):
        return jnp.sum(delta_rule(*arrays, query_length=1.0, implementation='pallas_gpu').astype(jnp.float32))

    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(loss, argnums=range(len(arrays)))).trace(*arrays).lower().compile()
    assert compiled.memory_analysis().output_size_in_bytes > 0
