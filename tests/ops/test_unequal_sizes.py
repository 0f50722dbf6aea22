"""Kernels take values of another size than keys: the sizes that are published compile, and the right kernel is chosen.

The interpreted kernels of each operation are tested with values of another size in the operation's own file.
"""

import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.hardware import describe_devices, parse
from lm.ops import delta_rule, exact_attention, linear_attention, platform
from lm.ops.delta_rule import DeltaCall
from lm.ops.delta_rule import compute as compute_delta
from lm.ops.errors import OperationError
from lm.ops.exact_attention import SoftmaxCall, cudnn
from lm.ops.exact_attention.tpu import softmax, splash

GENERATIONS = ['v4:2x2x1', 'v5e:2x2', 'v5p:2x2x1', 'v6e:2x2', 'v7x:2x2x1']
PUBLISHED = {
    'Gated DeltaNet': ('delta', 192, 384),
    'Qwen3-Next': ('delta', 128, 128),
    'one factor per channel': ('channels', 128, 256),
    'Mamba-2': ('linear', 128, 64),
    'latent attention': ('softmax', 96, 64),
    'wide softmax': ('softmax', 192, 128),
}
"""Name → the operation, and the sizes of a key and of a value."""


def delta(q, k, v, gate, logs):
    factors = {'log_decay_BxLxK': gate} if logs is None else {'channel_log_decay_BxLxKxE': logs}
    call = DeltaCall(q, k, v, jax.nn.sigmoid(gate), **factors, query_length=1.0)
    return compute_delta(call, 'pallas_tpu').o_BxLxHxD


OPERATIONS = {
    'delta': lambda *arrays: delta(*arrays, None),
    'channels': lambda q, k, v, gate: delta(q, k, v, gate, -jnp.abs(k).astype(jnp.float32)),
    'linear': lambda q, k, v, gate: linear_attention.linear_attention(
        q, k, v, log_decay_BxLxK=gate, normalize=False, implementation='pallas_tpu'
    ),
    'softmax': lambda q, k, v, gate: exact_attention.softmax_attention(
        q, k, v, implementation='pallas_tpu' if k.shape[-1] <= 128 else 'splash'
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize('name', PUBLISHED)
@pytest.mark.parametrize('generation', GENERATIONS)
def test_published_sizes_compile_for_every_generation(generation, name):
    """Forward and backward; two of the heads share a key head."""
    if importlib.util.find_spec('libtpu') is None:
        pytest.skip('libtpu is not installed')
    operation, key_size, value_size = PUBLISHED[name]
    mesh = jax.sharding.Mesh(np.array(describe_devices(parse(generation))[:1]), ('data',))
    one = jax.sharding.NamedSharding(mesh, jax.P())

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct((1, 1024, *shape), dtype, sharding=one)

    def gradients(*arrays):
        return jax.grad(lambda *arrays: OPERATIONS[operation](*arrays).astype(jnp.float32).sum(), range(3))(*arrays)

    arrays = array(4, key_size), array(2, key_size), array(2, value_size), array(2, dtype=jnp.float32)
    with jax.set_mesh(mesh):
        text = jax.jit(gradients).trace(*arrays).lower(lowering_platforms=('tpu',)).compile().as_text()
    assert text.count('tpu_custom_call') >= 2


def example(key_size, value_size):
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = ((4, key_size), (2, key_size), (2, value_size), (4, value_size))
    return [jax.random.normal(key, (1, 200, *size)) for key, size in zip(keys, sizes, strict=True)]


@pytest.mark.parametrize(('window', 'sizes'), [(None, (16, 32)), (70, (32, 16))])
def test_splash_attention_takes_other_values(window, sizes):
    *qkv, do = example(*sizes)

    def both(attend):
        o, pull = jax.vjp(attend, *qkv)
        return o, *pull(do)

    def by_splash(q, k, v):
        call = SoftmaxCall(q, k, v, scale=0.2, window=window)
        return splash.softmax_attention(call, interpret=True)

    def by_definition(q, k, v):
        return exact_attention.softmax_attention(q, k, v, scale=0.2, window=window, implementation='reference')

    for found, expected in zip(jax.jit(lambda: both(by_splash))(), both(by_definition), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_calls_go_to_a_kernel_that_takes_them(monkeypatch):
    choose = exact_attention.SOFTMAX.choose
    monkeypatch.setattr(platform.LOG, 'warning', lambda message: pytest.fail(message))
    monkeypatch.setattr(platform, 'target_platform', lambda: 'tpu')
    assert choose(None, SoftmaxCall(*example(96, 64)[:3], scale=1.0)) is softmax
    assert choose(None, SoftmaxCall(*example(192, 128)[:3], scale=1.0)) is splash
    monkeypatch.setattr(platform, 'target_platform', lambda: 'gpu')
    q, k, v = (x.astype(jnp.bfloat16) for x in example(128, 64)[:3])
    assert cudnn.unsupported(SoftmaxCall(q, k, v, scale=1.0)) is not None


def make_linear(q, k, v, gate, channels=False):
    logs = {'channel_log_decay_BxLxKxE': -jnp.abs(k).astype(jnp.float32)} if channels else {'log_decay_BxLxK': gate}
    return linear_attention.LinearCall(q, k, v, **logs, options=linear_attention.Options(normalize=False))


def make_delta(q, k, v, gate, channels=False):
    logs = {'channel_log_decay_BxLxKxE': -jnp.abs(k).astype(jnp.float32)} if channels else {'log_decay_BxLxK': gate}
    return DeltaCall(q, k, v, jax.nn.sigmoid(gate), **logs, query_length=1.0)


FORMS = {
    'linear attention, wide values': (linear_attention, make_linear, (32, 128), False),
    'linear attention, wide keys': (linear_attention, make_linear, (520, 64), False),
    'linear attention, a factor per channel': (linear_attention, make_linear, (32, 64), True),
    'delta rule, wide values': (delta_rule, make_delta, (64, 260), False),
    'delta rule, wide keys': (delta_rule, make_delta, (136, 64), False),
    'delta rule, a factor per channel': (delta_rule, make_delta, (32, 64), True),
}
"""Name → the operation, what makes its call, the sizes of keys and values, and whether factors are per channel."""


@pytest.mark.parametrize('name', FORMS)
def test_calls_that_hopper_kernels_do_not_take_are_refused_and_computed_by_xla(name, monkeypatch):
    """The operation asks each kernel before it runs; no kernel is launched."""
    operation, make, sizes, channels = FORMS[name]
    monkeypatch.setattr(platform, 'target_platform', lambda: 'gpu')
    monkeypatch.setattr(platform, 'device_kind', lambda: 'NVIDIA H100 80GB HBM3')
    monkeypatch.setattr(platform, 'MOSAIC_GPU_JAX', (0, 1))
    q, k, v = (x.astype(jnp.bfloat16) for x in example(*sizes)[:3])
    call = make(q, k, v, -jnp.abs(k[..., 0]).astype(jnp.float32), channels)
    kernels = [kernel for kernel in platform.KERNELS['gpu'] if kernel in operation.IMPLEMENTATIONS]
    if channels:  # the kernels for them could compute the call, and are chosen once a GPU has shown them
        kernels.remove('pallas_gpu_channels')
        monkeypatch.setattr(platform, 'read_shown', dict)
    for kernel in kernels:
        assert re.search('takes|is causal|has no', operation.IMPLEMENTATIONS[kernel].unsupported(call)), kernel
        with pytest.raises(OperationError, match=kernel):
            operation.compute(call, kernel)
    with platform.choices() as chosen:
        found = operation.compute(call)[0]
    assert set(chosen.values()) == {'xla'}
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), call)
    expected = operation.compute(wide, 'reference')[0]
    np.testing.assert_allclose(found.astype(jnp.float32), expected, rtol=0, atol=2e-2 * np.abs(expected).max())
