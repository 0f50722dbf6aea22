"""The GPU kernels with a factor per key channel, without a GPU; `test_pallas_gpu` explains how."""

import dataclasses

import grids
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_pallas_gpu import H200, can_compile, interpreted, interpreter
from test_pallas_tpu import quick

from lm.ops import platform
from lm.ops.linear_attention import IMPLEMENTATIONS, LinearCall, Options, State, compute
from lm.ops.linear_attention.gpu.channels import attention

OPTIONS = Options(normalize=False)
NAMES = ('o', 'state', 'dq', 'dk', 'dv', 'dlog_decay', 'dinitial_state')
CASES = {
    'factors of any size': {'length': 150},
    'odd sizes, grouped, less than a chunk': {'length': 40, 'heads': (2, 1), 'sizes': (40, 48)},
    'several parts of keys and of values': {'length': 66, 'sizes': (100, 70)},
    'two sequences': {'length': 64, 'batch': 2, 'heads': (4, 2)},
}
"""Name → arguments of `example`."""


def example(length, *, heads=(1, 1), sizes=(64, 64), batch=1):
    """Returns q, k, v, logs of factors and a state, and gradients of both results.

    Logs are moderate, 0, -1e4 or -inf; the last two end documents where a token has them in all channels.
    """
    keys = jax.random.split(jax.random.key(0), 8)
    (n, kv), (e, d) = heads, sizes
    shapes = [(n, e), (kv, e), (kv, d), (n, d)]
    q, k, v, do = (jax.random.normal(key, (batch, length, *s)) for key, s in zip(keys[:4], shapes, strict=True))
    logs = -jax.nn.softplus(2 * jax.random.normal(keys[4], k.shape) - 1)
    drawn = jax.random.uniform(keys[5], k.shape)
    logs = jnp.where(drawn < 0.03, -1e4, jnp.where(drawn > 0.97, -jnp.inf, jnp.where(drawn > 0.9, 0.0, logs)))
    logs = logs.at[:, 17].set(-jnp.inf).at[:, 35:37].set(-1e4)
    state, dstate = (jax.random.normal(key, (batch, kv, e, d)) for key in keys[6:])
    wide = [x.astype(jnp.bfloat16) for x in (q / e**0.5, k, v)]
    return [*wide, logs, state], (do.astype(jnp.bfloat16), dstate)


def results(implementation, dtype=jnp.bfloat16):
    """Returns outputs, the last state and all gradients."""

    def function(q, k, v, logs, state):
        totals = (jnp.zeros((*k.shape[:1], *k.shape[2:])),)
        call = LinearCall(q, k, v, channel_log_decay_BxLxKxE=logs, initial_state=State(state, totals), options=OPTIONS,
                          with_state=True)  # fmt: skip
        o, after = IMPLEMENTATIONS[implementation].linear_attention(call)
        return o, after.kv_BxKxRxD

    def both(arrays, cotangents):
        arrays = [x if x.dtype == jnp.float32 else x.astype(dtype) for x in arrays]
        (o, state), pull = jax.vjp(function, *arrays)
        do, dstate = cotangents
        return [o, state, *pull((do.astype(o.dtype), dstate))]

    return both


def errors(got, want) -> dict[str, float]:
    """Returns relative errors by name."""
    triples = zip(NAMES, got, want, strict=True)
    return {n: float(np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)) for n, a, b in triples}


@pytest.mark.smoke  # on Python 3.12 pip has a JAX that can interpret them
@interpreter
@pytest.mark.parametrize('name', grids.draw(CASES, 3))
def test_agrees_with_the_recurrence(name):
    arrays, cotangents = example(**CASES[name])
    with interpreted():
        got = quick(results('pallas_gpu_channels'))(arrays, cotangents)
    found = errors(got, jax.jit(results('reference', jnp.float32))(arrays, cotangents))
    assert all(error <= 1e-2 for error in found.values()), found


@interpreter
@pytest.mark.parametrize('log_factor', grids.draw([0.0, -1e-8, -1.0, -104.0, -1e4], 2))
def test_equal_keys_with_factors_of_any_size(log_factor):
    """Half of the channels do not fade."""
    (q, k, v, logs, state), cotangents = example(64)
    k = jnp.broadcast_to(k[:, :1], k.shape)
    arrays = [q, k, v, jnp.full_like(logs, log_factor).at[..., ::2].set(0.0), state]
    with interpreted():
        got = quick(results('pallas_gpu_channels'))(arrays, cotangents)
    found = errors(got, jax.jit(results('reference', jnp.float32))(arrays, cotangents))
    assert all(error <= 1e-2 for error in found.values()), found


@interpreter
def test_repeated_calls_give_the_same_bits():
    arrays, cotangents = example(**CASES['odd sizes, grouped, less than a chunk'])
    with interpreted():
        function = quick(results('pallas_gpu_channels'))
        first, second = (function(arrays, cotangents) for _ in range(2))
    assert [np.asarray(x).tobytes() for x in first] == [np.asarray(x).tobytes() for x in second]


@interpreter
def test_nothing_leaks_from_earlier_documents():
    """A factor of 0 in all channels begins a document: changes before it change no bit after it."""
    (q, k, v, logs, state), _ = example(80)
    other = [x.at[:, :17].multiply(-2) for x in (k, v)]

    def attend(k, v, state):
        call = LinearCall(q, k, v, channel_log_decay_BxLxKxE=logs, options=OPTIONS,
                          initial_state=State(state, (jnp.zeros((1, 1, 64)),)))  # fmt: skip
        return attention.linear_attention(call).o_BxLxHxD[:, 17:]

    with interpreted():
        found, changed = quick(attend)(k, v, state), quick(attend)(*other, 3 * state)
    np.testing.assert_array_equal(found, changed)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(platform, 'target_platform', lambda: 'gpu')
    monkeypatch.setattr(platform, 'device_kind', lambda: 'NVIDIA H100 80GB HBM3')
    monkeypatch.setattr(platform, 'MOSAIC_GPU_JAX', (0, 1))


def make_call(sizes=(64, 64)):
    (q, k, v, logs, _), _ = example(130, sizes=sizes)
    return LinearCall(q, k, v, channel_log_decay_BxLxKxE=logs, options=OPTIONS)


def test_the_kernels_are_chosen_by_name_until_they_are_shown_and_refuse_other_calls(hopper, monkeypatch):
    monkeypatch.setattr(platform, 'read_shown', dict)
    call = make_call()
    assert IMPLEMENTATIONS.choose('pallas_gpu_channels', call) is attention
    with platform.choices() as chosen:
        compute(call)
    assert set(chosen.values()) == {'xla'}
    monkeypatch.setattr(platform, 'read_shown', lambda: {'linear attention: pallas_gpu_channels': 'a row'})
    assert IMPLEMENTATIONS.choose(None, call) is IMPLEMENTATIONS['pallas_gpu_channels']
    assert 'heads of up to 256' in attention.unsupported(make_call((64, 300)))
    assert 'bfloat16, not float32' in attention.unsupported(
        dataclasses.replace(call, v_BxLxKxD=call.v_BxLxKxD.astype(jnp.float32))
    )
    assert 'one factor per key channel' in attention.unsupported(
        dataclasses.replace(call, channel_log_decay_BxLxKxE=None)
    )
    monkeypatch.setattr(platform, 'device_kind', lambda: 'NVIDIA A100-SXM4-80GB')
    assert 'H100' in attention.unsupported(call)


@pytest.mark.skipif(not can_compile(), reason="needs JAX's CUDA plugin and ptxas")
@pytest.mark.parametrize('sizes', [(64, 64), (128, 256)])
def test_compiles_for_an_h200(sizes):
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(topology_name='h200', platform='cuda', target_config=H200, topology='1x1x1')
    mesh = jax.sharding.Mesh(np.array(topology.devices), ('data',))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    arrays = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated) for x in example(1000, heads=(4, 2), sizes=sizes)[0]
    ]

    def loss(q, k, v, logs, state):
        o, after = results_of_call(q, k, v, logs, state)
        return jnp.sum(o.astype(jnp.float32) ** 2) + jnp.sum(after**2)

    def results_of_call(q, k, v, logs, state):
        totals = (jnp.zeros((*k.shape[:1], *k.shape[2:])),)
        call = LinearCall(q, k, v, channel_log_decay_BxLxKxE=logs, initial_state=State(state, totals), options=OPTIONS,
                          with_state=True)  # fmt: skip
        o, after = compute(call, 'pallas_gpu_channels')
        return o, after.kv_BxKxRxD

    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(loss, range(5))).trace(*arrays).lower().compile()
    assert compiled.memory_analysis().output_size_in_bytes > 0
