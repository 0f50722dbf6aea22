"""Bytes between HBM and the core, compared with programs that can be counted by hand."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from test_program import PROGRAM

from lm.cost_model.program import HloProgram
from lm.cost_model.traffic import hbm_bytes
from lm.hardware import describe_devices, parse

NESTED = """HloModule nested, is_scheduled=true

%one_row (p0: f32[10,128], p1: s32[]) -> f32[1,128] {
  %p0 = f32[10,128]{1,0} parameter(0)
  %flat = f32[10,1,128]{2,1,0} bitcast(%p0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %cut = f32[1,1,128]{2,1,0} dynamic-slice(%flat, %p1, %zero, %zero), dynamic_slice_sizes={1,1,128}
  ROOT %row = f32[1,128]{1,0} bitcast(%cut)
}

%put_row (p0: f32[10,128], p1: f32[1,128], p2: s32[]) -> f32[10,128] {
  %p0 = f32[10,128]{1,0} parameter(0)
  %p1 = f32[1,128]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %new = f32[10,128]{1,0} dynamic-update-slice(%p0, %p1, %p2, %zero)
}

%read (p0: f32[10,128], p1: s32[], p2: f32[1,128]) -> f32[1,128] {
  %p0 = f32[10,128]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = f32[1,128]{1,0} parameter(2)
  %row = f32[1,128]{1,0} fusion(%p0, %p1), kind=kLoop, calls=%one_row
  ROOT %sum = f32[1,128]{1,0} add(%row, %p2)
}

%write (p0: f32[10,128], p1: f32[1,128], p2: s32[]) -> f32[10,128] {
  %p0 = f32[10,128]{1,0} parameter(0)
  %p1 = f32[1,128]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  %first = f32[10,128]{1,0} fusion(%p0, %p1, %p2), kind=kLoop, calls=%put_row
  ROOT %second = f32[10,128]{1,0} dynamic-update-slice(%first, %p1, %zero, %zero)
}

%fill (p1: f32[1,128], p2: s32[]) -> f32[10,128] {
  %p1 = f32[1,128]{1,0} parameter(0)
  %p2 = s32[] parameter(1)
  %nothing = f32[] constant(0)
  %zeros = f32[10,128]{1,0} broadcast(%nothing), dimensions={}
  ROOT %filled = f32[10,128]{1,0} fusion(%zeros, %p1, %p2), kind=kLoop, calls=%put_row
}

ENTRY %main (x: f32[10,128], y: f32[1,128], i: s32[]) -> RESULT {
  %x = f32[10,128]{1,0} parameter(0)
  %y = f32[1,128]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT INSTRUCTION
}
"""
ROW = 128 * 4


def test_traffic_of_a_program_that_can_be_counted_by_hand():
    reads_a_row, copies_it, writes_a_row, counter = 2 * ROW, ROW, ROW, 3 * 4 + 2 * 4
    assert hbm_bytes(HloProgram(PROGRAM)) == 4 * (reads_a_row + copies_it + writes_a_row + counter)


@pytest.mark.parametrize(
    ('instruction', 'rows'),
    [
        # It reads a row of x and y, and writes the sum.
        ('%out = f32[1,128]{1,0} fusion(%x, %i, %y), kind=kLoop, calls=%read', 3),
        # The traffic is y and two rows of x.
        ('%out = f32[10,128]{1,0} fusion(%x, %y, %i), kind=kLoop, calls=%write', 3),
        # It reads y, and writes a whole array that did not exist before.
        ('%out = f32[10,128]{1,0} fusion(%y, %i), kind=kLoop, calls=%fill', 11),
        # A row that lies in on-chip memory costs one write.
        ('%out = f32[10,128]{1,0} dynamic-update-slice(%x, %near, %i, %i)', 1),
    ],
)
def test_fusions_are_looked_through(instruction, rows):
    near = '%near = f32[1,128]{1,0:T(1,128)S(1)} parameter(3)\n  ROOT '
    program = HloProgram(NESTED.replace('ROOT INSTRUCTION', near + instruction))
    assert hbm_bytes(program) == rows * ROW + 4 * instruction.count('fusion(')


COPY = '((f32[10,128]{1,0}), f32[10,128]{0,1}) call-update(%begun, %x)'
GATHER = '((f32[10,128]{1,0}), f32[1,128]{1,0}) call-update(%begun, %x)'


@pytest.mark.parametrize(('update', 'rows'), [(COPY, 20), (GATHER, 0)], ids=['copy', 'gather'])
def test_copies_of_sparse_cores_are_read_and_written(update, rows):
    result = update[update.index('), ') + 3 : update.index(') call')]
    lines = [
        '%begun = ((), (), (s32[1]{0:T(128)S(2)})) call-start(), async_execution_thread="sparsecore", to_apply=%read',
        f'%updated = {update}',
        f'ROOT %out = {result} call-done(%updated)',
    ]
    program = HloProgram(NESTED.replace('ROOT INSTRUCTION', '\n  '.join(lines)))
    assert hbm_bytes(program) == rows * ROW


def through_layers(w_LxNxN, x_TxN):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x_TxN, w_LxNxN)[0]


def weight_gradients(w_LxNxN, x_TxN):
    return jax.grad(lambda w: jnp.sum(through_layers(w, x_TxN).astype(jnp.float32)))(w_LxNxN)


def every_other_row(x_RxN, y_1xN):
    def body(i, x):
        return lax.dynamic_update_slice_in_dim(x, 2 * lax.dynamic_slice_in_dim(x, i, 1, 0) + y_1xN, 2 * i, 0)

    return lax.fori_loop(0, x_RxN.shape[0] // 2, body, x_RxN)


@pytest.mark.compiles
@pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='libtpu is not installed')
@pytest.mark.parametrize(
    ('function', 'shapes', 'dtype', 'times'),
    [
        # The program reads the stacked weights once, in slices.
        (through_layers, [(32, 2048, 2048), (16, 2048)], 'bfloat16', 1),
        # It reads the weights forward and backward; it sets their gradients to zero and writes them in slices.
        (weight_gradients, [(32, 2048, 2048), (16, 2048)], 'bfloat16', 4),
        # For half of the rows, it reads the row and y, and writes the row.
        (every_other_row, [(64, 2**23), (1, 2**23)], 'float32', 1.5),
    ],
)
def test_traffic_of_what_a_tpu_runs(function, shapes, dtype, times):
    """The unit is the size of the large array, which does not fit in on-chip memory. The other arrays are small."""
    sharding = jax.sharding.SingleDeviceSharding(describe_devices(parse('v5e:2x2'))[0])
    large, small = (jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape in shapes)
    donated = (0,) if function is every_other_row else ()
    program = HloProgram(jax.jit(function, donate_argnums=donated).lower(large, small).compile().as_text())
    assert not program.unknown_loops
    assert hbm_bytes(program) == pytest.approx(times * large.size * large.dtype.itemsize, rel=0.05)


def kept_products(w_LxNxN, x_TxN):
    """Returns the gradient of layers that keep their products: they write and read stacked arrays in slices."""
    keep = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

    def layer(x, w):
        return jnp.tanh(x @ w) * x, None

    layers = jax.checkpoint(layer, policy=keep, prevent_cse=False)
    return jax.grad(lambda x: jnp.sum(lax.scan(layers, x, w_LxNxN)[0].astype(jnp.float32)))(x_TxN)


@pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='libtpu is not installed')
def test_traffic_of_slices_in_nested_fusions():
    """The unit is the size of x. There is one copy before the loops.

    Forward, a layer copies x, stacks it, reads it for x · w and a new x, and stacks x · w. Backward, it copies the
    gradient; it reads both stacks, the gradient and its copy, and writes a new gradient.
    """
    sharding = jax.sharding.SingleDeviceSharding(describe_devices(parse('v5e:2x2'))[0])
    w, x = (jax.ShapeDtypeStruct(s, 'bfloat16', sharding=sharding) for s in ((4, 256, 256), (2**19, 256)))
    program = HloProgram(jax.jit(kept_products).lower(w, x).compile().as_text())
    fusions = [i for name in program.times for i in program.computations[name] if i.opcode == 'fusion']
    nested = [j.name for i in fusions for j, owner in program.within(i) if owner and j.opcode == 'fusion']
    assert nested
    assert hbm_bytes(program) == pytest.approx((2 + 4 * (2 + 2 + 3 + 2) + 4 * (2 + 5)) * x.size * 2, rel=0.05)
