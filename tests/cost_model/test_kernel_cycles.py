"""Kernels compiled alone have the same schedules as inside the program that they come from."""

import importlib.util
import json
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from lm.compilation.compiler import compile_with_text
from lm.cost_model import kernel_cycles, lone_kernels, schedules
from lm.cost_model.kernel_cycles import KernelCycles
from lm.cost_model.program import HloProgram
from lm.cost_model.schedules import Grid
from lm.hardware import describe_devices, parse
from lm.ops.exact_attention import softmax_attention
from lm.ops.short_convolution import short_convolution

V5E, V4 = parse('v5e:2x2'), parse('v4:2x2x1')
CONFIG = '{"custom_call_config":{"body":"x"},"retry_config":{}}'
PROGRAM = """HloModule step

ENTRY %main (x: bf16[8,16]) -> f32[4] {
  %x = bf16[8,16]{1,0} parameter(0)
  %a.1 = f32[4]{0} custom-call(%x), custom_call_target="tpu_custom_call", backend_config=CONFIG
  %a.2 = f32[4]{0} custom-call(%x), custom_call_target="tpu_custom_call", backend_config=CONFIG
  %other = f32[4]{0} custom-call(%x), custom_call_target="Sharding"
  %b = f32[4]{0} custom-call(%x), custom_call_target="tpu_custom_call"
  ROOT %c = f8e4m3fn[4]{0} custom-call(%x), custom_call_target="tpu_custom_call", backend_config=CONFIG
}
""".replace('CONFIG', CONFIG)
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='libtpu is not installed')


def test_equal_kernels_are_compiled_once_and_cores_share_their_grid(monkeypatch):
    asked = []

    def compile_(kernels, chip):
        asked.append((chip, list(kernels)))
        return [7]

    monkeypatch.setattr(lone_kernels, '_compile', compile_)
    monkeypatch.setattr(kernel_cycles, 'read_grid', lambda body: Grid((3, 2), parallel=(True, True)))
    lone_kernels._known.cache_clear()
    program = HloProgram(PROGRAM)
    for _ in range(2):
        cycles = KernelCycles(program, V5E)
    found = {i.name: cycles.of(i) for i in program.computations['main']}
    assert found == {'x': None, 'a.1': 7 * 6, 'a.2': 7 * 6, 'other': None, 'b': None, 'c': None}
    ((chip, (kernel,)),) = asked
    assert (chip, kernel.arrays, kernel.results) == ('v5e', (('bfloat16', (8, 16)),), (('float32', (4,)),))
    assert kernel.operands == (0,)
    assert json.loads(kernel.config)['custom_call_config']['body'] == 'x'
    assert 'retry_config' not in kernel.config
    lone_kernels._known.cache_clear()
    assert KernelCycles(program, V4).of(program.by_name['main']['a.1']) == 7 * 3  # two cores per device


def product(x, w):
    """Returns a kernel of eight steps between operations of XLA."""

    def kernel(x_ref, w_ref, o_ref):
        y = jax.lax.dot(jnp.exp(x_ref[...]), w_ref[...], preferred_element_type=jnp.float32)
        o_ref[...] = y.astype(o_ref.dtype)

    row = pl.BlockSpec((64, 256), lambda i: (i, 0))
    whole = pl.BlockSpec((256, 256), lambda i: (0, 0))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    y = pl.pallas_call(kernel, out_shape=shape, grid=(8,), in_specs=[row, whole], out_specs=row, name='some_product')(
        x * 2, w
    )
    return jax.nn.softmax(y @ w)


def lowered(topology):
    sharding = jax.sharding.SingleDeviceSharding(describe_devices(topology)[0])
    shapes = ((512, 256), (256, 256))
    return jax.jit(product).lower(*(jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=sharding) for s in shapes))


@needs_libtpu
def test_a_kernel_has_the_same_schedule_alone(tmp_path):
    """The test compares a program compiled with all schedules written and the kernel compiled alone."""
    found = compile_with_text(lowered(V5E))
    program = HloProgram(found.text)
    (kernel,) = (i for body in program.computations.values() for i in body if i.is_kernel)
    assert HloProgram(found.executable.as_text()).by_name.keys() == program.by_name.keys()
    dump = tmp_path / 'dump'
    dump.mkdir()
    code = """
        import sys
        from test_kernel_cycles import V5E, lowered
        from lm.cost_model.schedules import read_schedule
        lowered(V5E).compile()
        schedule = read_schedule(sys.argv[1], 'some_product')
        print(schedule.cycles, schedule.rows)
    """
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    environment = schedules.environment(str(dump)) | {'PYTHONPATH': path}
    command = [sys.executable, '-c', textwrap.dedent(code), str(dump)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    cycles, rows = map(float, done.stdout.split()[-2:])
    assert cycles > 100
    assert rows == 64 * 4, '64 rows meet four tiles of 128 × 128 weights'
    assert KernelCycles(program, V5E).of(kernel) == 8 * cycles


@needs_libtpu
@pytest.mark.parametrize(
    ('length', 'window', 'pairs'),
    [
        (2048, None, 3),  # 2 × 2 blocks of 1,024
        (8192, 3500, 16 * 8),  # blocks of 512: half of the columns, as long key blocks would leave them
    ],
)
def test_steps_of_jax_splash_kernels(length, window, pairs):
    """Forward and backward with four heads: the number of computed pairs of blocks."""
    mesh = jax.sharding.Mesh(np.array(describe_devices(V5E)), ('data',))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))
    q = jax.ShapeDtypeStruct((4, length, 4, 64), jnp.bfloat16, sharding=sharding)

    def loss(q, k, v):
        return softmax_attention(q, k, v, window=window, implementation='splash').astype(jnp.float32).sum()

    with jax.set_mesh(mesh):
        lowered = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, q, q).lower(lowering_platforms=('tpu',))
        program = HloProgram(compile_with_text(lowered).text)
    kernels = [i for body in program.computations.values() for i in body if i.is_kernel]
    assert len(kernels) >= 2
    assert {kernel_cycles.grid_steps(kernel) / 4 for kernel in kernels} == {pairs}


@pytest.mark.parametrize(
    ('steps', 'heads', 'working'),
    [
        ((8, 16, 8), 4, 16 * 36),  # gradients of 4 key heads, which 16 query heads share
        ((16, 8, 8), 16, 16 * 36),
        ((8, 8, 2), 8, 8 * 16),  # a window: the grid has the pairs that count
    ],
)
def test_heads_of_jax_splash_kernels_may_share_keys(steps, heads, working, monkeypatch):
    blocks = ((1, 1024, 64), (1, 1024, 64))
    monkeypatch.setattr(kernel_cycles, 'read_grid', lambda body: Grid(steps, (True,) * 3, blocks))
    text = PROGRAM.replace('%a.1 = f32[4]{0}', f'%splash_mha_dkv.1 = bf16[{heads},8192,64]{{2,1,0}}')
    (kernel,) = (i for i in HloProgram(text).computations['main'] if i.name == 'splash_mha_dkv.1')
    assert kernel_cycles.grid_steps(kernel) == working


@needs_libtpu
def test_a_kernel_that_cannot_be_compiled_has_no_cycles():
    lone_kernels._known.cache_clear()
    broken = lone_kernels.LoneKernel(CONFIG, (('bfloat16', (8, 16)),), (0,), (('float32', (4,)),), False)
    assert lone_kernels.cycles([broken], 'v5e') == {}


@needs_libtpu
def test_an_array_that_a_kernel_reads_twice_is_on_chip_once():
    """The compiler finds room on chip once for these 100 MB."""
    mesh = jax.sharding.Mesh(np.array(describe_devices(V5E)[:1]), ('data',))
    x, kernel = jax.ShapeDtypeStruct((1, 32768, 1536), jnp.bfloat16), jax.ShapeDtypeStruct((4, 1536), jnp.float32)

    def gradient(x, kernel, dy):
        return jax.vjp(lambda x: short_convolution(2 * x, kernel), x)[1](dy)

    with jax.set_mesh(mesh):
        program = HloProgram(compile_with_text(jax.jit(gradient).lower(x, kernel, x)).text)
    (backward,) = (i for body in program.computations.values() for i in body if i.is_kernel)
    assert len(set(backward.operands)) < len(backward.operands)
    assert KernelCycles(program, V5E).of(backward) > 0


def test_other_compilers_are_asked_for_their_text_alone():
    found = compile_with_text(jax.jit(jnp.tanh).lower(jnp.ones(3)))
    assert found.text.startswith('HloModule')
    assert found.executable(jnp.zeros(3)).sum() == 0
