"""The memory that a compiled program needs."""

import importlib.util
import types

import jax
import jax.numpy as jnp
import pytest

from lm.compilation.compiler import compile_with_text
from lm.compilation.memory import program_memory
from lm.hardware import describe_devices, parse

REPORT = """Memory Space: default (color=0)
Total bytes: 7000 (6.8KiB)
  cumulative_size;       size

Memory Space: alternate (color=1)
Total bytes: 500 (500B)
"""


def stats(**others):
    sizes = {'argument': 3000, 'output': 2000, 'alias': 1000, 'temp': 4500}
    sizes = {f'{name}_size_in_bytes': size for name, size in sizes.items()} | others
    return types.SimpleNamespace(memory_analysis=lambda: types.SimpleNamespace(**sizes))


def test_the_report_of_the_compiler_wins_over_its_figures():
    found = program_memory(stats(peak_memory_in_bytes=6800), REPORT)
    assert (found.peak, found.temporaries) == (7000, 3000)
    assert (found.arguments, found.outputs, found.aliased) == (3000, 2000, 1000)


@pytest.mark.parametrize(('backend', 'peak', 'total'), [('tpu', 6800, 6800), ('tpu', 0, 8500), ('cpu', 4000, 8500)])
def test_the_figures_count_if_there_is_no_report(backend, peak, total, monkeypatch):
    monkeypatch.setattr(jax, 'default_backend', lambda: backend)
    found = program_memory(stats(peak_memory_in_bytes=peak))
    assert (found.peak, found.temporaries) == (total, total - 4000)


def test_a_compiler_may_give_no_figures():
    assert program_memory(types.SimpleNamespace(memory_analysis=lambda: None)) is None


def test_a_cpu_counts_the_values_between_inputs_and_outputs():
    x = jax.ShapeDtypeStruct((256, 1024), jnp.float32)
    found = program_memory(jax.jit(lambda x: jnp.sort(jnp.sin(x) @ jnp.cos(x).T)).lower(x).compile())
    assert found.peak >= found.arguments + found.outputs + 256 * 1024 * 4


@pytest.mark.smoke  # the other Python has another libtpu
@pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='libtpu is not installed')
def test_a_described_chip_needs_what_its_buffers_take():
    """The figure is compared with JAX's peak, which leaves out the gaps between buffers."""
    sharding = jax.sharding.SingleDeviceSharding(describe_devices(parse('v5e:1x1'))[0])
    x, w = (jax.ShapeDtypeStruct(s, jnp.float32, sharding=sharding) for s in ((8192, 1024), (8, 1024, 1024)))

    def loss(w, x):
        for _ in range(2):  # with two loops libtpu 0.0.42 counts some buffers twice
            x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)
        return x.sum()

    program = compile_with_text(jax.jit(jax.grad(loss)).lower(w, x))
    peak = program.executable.memory_analysis().peak_memory_in_bytes
    assert peak > 16 * 8192 * 1024 * 4
    assert peak <= program.memory.peak <= 1.1 * peak
