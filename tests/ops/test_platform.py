"""The axes of a mesh that split the batch, and the limits of a chip for its kernels."""

import subprocess
import sys
import types

import jax
import numpy as np
import pytest
import tiny

from lm.ops import cross_entropy, platform


def mesh_of(**axes):
    shape = tuple(axes.values())
    return jax.sharding.Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), tuple(axes))


@pytest.mark.parametrize(
    ('axes', 'split'),
    [
        ({'data': 2, 'fsdp': 4}, ('data', 'fsdp')),
        ({'data': 8, 'fsdp': 1}, ('data',)),
        ({'fsdp': 2}, ('fsdp',)),
        ({'data': 2, 'fsdp': 2, 'sequence': 2}, ('data', 'fsdp')),
        ({'sequence': 4}, ()),
    ],
)
def test_the_batch_is_split_over_the_data_axes_alone(axes, split):
    mesh = mesh_of(**axes)
    shards = int(np.prod([axes[name] for name in split]))
    assert platform.data_shards(mesh) == shards
    with jax.set_mesh(mesh):
        assert platform.batch_axes() == split
        assert platform.batch_shards() == shards
        assert platform.uneven_batch(2 * shards) is None
        assert (platform.uneven_batch(2 * shards + 1) is None) == (shards == 1)


def test_axes_inside_shard_map_split_nothing_more():
    seen = []

    def inside(x):
        seen.append((platform.batch_axes(), platform.batch_shards()))
        return x

    with jax.set_mesh(mesh_of(data=2, fsdp=2)):
        platform.per_device(inside, split=(True,))(np.ones((4, 3), np.float32))
    assert seen == [((), 1)]


def test_without_a_mesh_nothing_is_split():
    assert platform.batch_axes() == ()
    assert platform.batch_shards() == 1


@pytest.mark.parametrize(
    ('kind', 'mebibytes', 'asked'),
    [('TPU v3', 16, None), ('TPU v4', 16, None), ('TPU v5 lite', 32, 32), ('cpu', 32, 32)],
)
def test_vmem_follows_the_kind_of_device(kind, mebibytes, asked, monkeypatch):
    monkeypatch.setattr(jax, 'devices', lambda: [types.SimpleNamespace(device_kind=kind)])
    available, limit = platform.vmem()
    assert available == mebibytes * 2**20
    assert limit == (asked and asked * 2**20)


def test_implementations_are_imported_when_they_are_asked_for():
    code = (
        'import sys, lm.session.train; from lm.ops.linear_attention import IMPLEMENTATIONS\n'
        "kernels = 'lm.ops.linear_attention.tpu.attention'\n"
        "assert 'pallas_tpu' in IMPLEMENTATIONS and kernels not in sys.modules\n"
        "assert 'jax.experimental.pallas' not in sys.modules\n"
        "assert IMPLEMENTATIONS['pallas_tpu'] is sys.modules[kernels]\n"
    )
    subprocess.run([sys.executable, '-c', code], env=tiny.environment(), cwd=tiny.ROOT, check=True)


def test_kernels_that_an_operation_lacks_are_skipped(monkeypatch):
    monkeypatch.setattr(platform.LOG, 'warning', lambda message: pytest.fail(message))
    for target in ('cpu', 'tpu', 'gpu'):
        monkeypatch.setattr(platform, 'target_platform', lambda target=target: target)
        assert cross_entropy.IMPLEMENTATIONS.choose(None, None) is cross_entropy.IMPLEMENTATIONS['xla']


def test_kernels_refuse_too_few_tokens():
    assert platform.choose_for_short(1) == platform.choose_for_short(127) == 'xla'
    assert platform.choose_for_short(128) is None
