"""A process finds out whether it belongs to a job."""

import importlib
import types

import jax
import pytest

from lm.pod import job


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
def test_tpu_workers_are_detected_with_and_without_private_names_of_jax(monkeypatch, module, variables, answer):
    def import_module(name):
        if module is None:
            raise ImportError(name)
        return module

    monkeypatch.setattr(importlib, 'import_module', import_module)
    monkeypatch.setattr(jax, 'config', types.SimpleNamespace(values={'jax_platforms': None}))
    for name in job.TPU_VARIABLES:
        monkeypatch.setenv(name, '0') if variables else monkeypatch.delenv(name, raising=False)
    assert job._on_cloud_tpu() is answer
