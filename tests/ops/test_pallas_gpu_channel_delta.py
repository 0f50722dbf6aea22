"""The GPU kernels of the delta rule with a factor per key channel, without a GPU; `test_pallas_gpu` explains how."""

import dataclasses

import grids
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_pallas_gpu_channels as linear
import test_pallas_gpu_delta as delta
from test_pallas_gpu import H200, can_compile, interpreted, interpreter
from test_pallas_tpu import quick

from lm.ops import platform
from lm.ops.delta_rule import IMPLEMENTATIONS, DeltaCall, compute
from lm.ops.delta_rule.gpu.channels import rule

NAMES = (*delta.NAMES, 'dchannels')
CASES = {
    'factors of any size': {'length': 130},
    'odd sizes, grouped, negative': {'length': 70, 'heads': (4, 2), 'sizes': (40, 48), 'beta': 2.0},
    'less than a chunk, no factors of heads': {'length': 20, 'decay': False},
    'parts of keys and values': {'length': 70, 'heads': (2, 1), 'sizes': (100, 180)},
}


def example(length, **settings):
    """Returns the arguments of an implementation, and gradients of its results."""
    (q, k, v, beta, logs, state), cotangents = delta.example(length, **settings)
    heads = k.shape[2]
    channels = linear.example(length, heads=(heads, heads), sizes=k.shape[-1:] * 2)[0][3]
    logs = None if logs is None else jnp.maximum(logs, -1e4)
    return [q, k, v, beta, logs, state, channels], cotangents


def errors(got, want) -> dict[str, float]:
    """Returns relative errors by name."""
    return delta.errors(got, want, NAMES)


def check(arrays, cotangents, tolerance):
    with interpreted():
        got = quick(delta.results('pallas_gpu_channels'))(arrays, cotangents)
    found = errors(got, jax.jit(delta.results('reference', jnp.float32))(arrays, cotangents))
    assert all(error <= tolerance for error in found.values()), found


@pytest.mark.smoke  # on Python 3.12 pip has a JAX that can interpret them
@interpreter
@pytest.mark.parametrize('name', grids.draw(CASES, 3))
def test_agrees_with_the_recurrence(name):
    check(*example(**CASES[name]), 2e-2)


@interpreter
@pytest.mark.parametrize('log_factor', grids.draw([0.0, -1.0, -1e4], 2))
def test_a_repeated_key_stays_exact(log_factor):
    """Each token replaces what its key held; half of the channels fade."""
    (*tokens, _, state, channels), cotangents = example(64, one_key=True)
    channels = jnp.full_like(channels, log_factor).at[..., ::2].set(0.0)
    check([*tokens, None, state, channels], cotangents, 3e-2)


@interpreter
def test_repeated_calls_give_the_same_bits():
    arrays, cotangents = example(20)
    with interpreted():
        function = quick(delta.results('pallas_gpu_channels'))
        first, second = (jax.tree.leaves(function(arrays, cotangents)) for _ in range(2))
    assert [np.asarray(x).tobytes() for x in first] == [np.asarray(x).tobytes() for x in second]


@interpreter
def test_nothing_leaks_from_earlier_documents():
    """A factor of 0 in all channels begins a document: changes before it change no bit after it."""
    (q, k, v, beta, _, state, channels), _ = example(70, decay=False)
    other = [x.at[:, :17].multiply(-2) for x in (k, v)]

    def attend(k, v, state):
        return rule.delta_rule(DeltaCall(q, k, v, beta, None, state, channels, 1.0)).o_BxLxHxD[:, 17:]

    with interpreted():
        found, changed = quick(attend)(k, v, state), quick(attend)(*other, 3 * state)
    np.testing.assert_array_equal(found, changed)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(platform, 'target_platform', lambda: 'gpu')
    monkeypatch.setattr(platform, 'device_kind', lambda: 'NVIDIA H100 80GB HBM3')
    monkeypatch.setattr(platform, 'MOSAIC_GPU_JAX', (0, 1))


def test_the_kernels_are_chosen_by_name_until_they_are_shown_and_refuse_other_calls(hopper, monkeypatch):
    monkeypatch.setattr(platform, 'read_shown', dict)
    call = DeltaCall(*example(130)[0])
    assert IMPLEMENTATIONS.choose('pallas_gpu_channels', call) is rule
    with platform.choices() as chosen:
        compute(call)
    assert set(chosen.values()) == {'xla'}
    monkeypatch.setattr(platform, 'read_shown', lambda: {'the delta rule: pallas_gpu_channels': 'a row'})
    assert IMPLEMENTATIONS.choose(None, call) is IMPLEMENTATIONS['pallas_gpu_channels']
    assert 'keys of up to 128' in rule.unsupported(DeltaCall(*example(130, sizes=(129, 64))[0]))
    wide = dataclasses.replace(call, v_BxLxKxD=call.v_BxLxKxD.astype(jnp.float32))
    assert 'bfloat16, not float32' in rule.unsupported(wide)
    scalar = dataclasses.replace(call, channel_log_decay_BxLxKxE=None)
    assert 'one factor per key channel' in rule.unsupported(scalar)


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

    def loss(*arrays):
        o, state = compute(DeltaCall(*arrays, query_length=1.0), 'pallas_gpu_channels')
        return jnp.sum(o.astype(jnp.float32) ** 2) + jnp.sum(state**2)

    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(loss, range(7))).trace(*arrays).lower().compile()
    assert compiled.memory_analysis().output_size_in_bytes > 0
