"""What a mesh says of its batches, and whether this is a TPU worker, with and without JAX's private answer."""

import importlib
import types

import jax
import pytest

from lm.training import mesh
from lm.training.mesh import MeshConfig, data_shards, make_mesh, shared_rows


@pytest.mark.parametrize('fsdp', [1, 4])
def test_a_batch_is_split_over_all_devices_of_the_data_axes(fsdp):
    assert data_shards(make_mesh(MeshConfig(fsdp=fsdp))) == 8
    other = jax.make_mesh((2, 2, 2), ('data', 'fsdp', 'model'))
    assert data_shards(other) == 4
    assert [shared_rows(n, other) for n in (1, 4, 5)] == [4, 4, 8]


class Present:
    is_env_present = staticmethod(lambda: True)


@pytest.mark.parametrize(
    ('module', 'variables', 'answer'),
    [
        (types.SimpleNamespace(GceTpuCluster=Present), False, True),
        (types.SimpleNamespace(), False, False),
        (types.SimpleNamespace(), True, True),
        (types.SimpleNamespace(GceTpuCluster=object), False, False),
        (None, False, False),
        (None, True, True),
    ],
)
def test_workers_are_known_also_without_what_is_private_in_jax(monkeypatch, module, variables, answer):
    def import_module(name):
        if module is None:
            raise ImportError(name)
        return module

    monkeypatch.setattr(importlib, 'import_module', import_module)
    monkeypatch.setattr(jax, 'config', types.SimpleNamespace(jax_platforms=None))
    for name in mesh.TPU_VARIABLES:
        monkeypatch.setenv(name, '0') if variables else monkeypatch.delenv(name, raising=False)
    assert mesh._on_cloud_tpu() is answer
