"""Each TPU kernel reads all its operands. libtpu 0.0.43 to 0.0.45 give zeros where a kernel leaves one unread."""

import importlib.util
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.experimental import pallas as pl

from lm.attention import HeadDims
from lm.hardware import describe_devices, parse

sys.path.insert(0, str(tiny.ROOT))
from scripts.kernels.measure import HEAD_DIM, HEADS, LENGTH, cases

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='needs libtpu')


def find_subprograms(equation):
    """Yields the programs inside an equation, each with the operands that its last arguments stand for."""
    for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, 'eqns') or hasattr(x, 'jaxpr')):
        jaxpr = getattr(value, 'jaxpr', value)
        if hasattr(jaxpr, 'eqns'):
            arguments = jaxpr.invars or []
            yield jaxpr, dict(zip(reversed(arguments), reversed(equation.invars), strict=False))
            yield jaxpr, dict(zip(jaxpr.constvars, equation.invars, strict=False))


def is_used(variable, jaxpr):
    """Returns whether an equation of the program, or of one inside it, takes the variable."""
    for equation in jaxpr.eqns:
        if not any(operand is variable for operand in equation.invars):
            continue
        inside = [
            (program, inner)
            for program, outer in find_subprograms(equation)
            for inner, operand in outer.items()
            if operand is variable
        ]
        if not inside or any(is_used(inner, program) for program, inner in inside):
            return True
    return False


def find_kernels(jaxpr):
    """Yields all equations that call a kernel."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == 'pallas_call':
            yield equation
            continue
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, 'eqns') or hasattr(x, 'jaxpr')):
            inner = getattr(value, 'jaxpr', value)
            if hasattr(inner, 'eqns'):
                yield from find_kernels(inner)


def find_unread(kernel):
    """Returns the numbers of the operands in memory that a kernel never reads; numbers of blocks do not count."""
    mapping, jaxpr = kernel.params['grid_mapping'], kernel.params['jaxpr']
    first = mapping.num_index_operands
    inputs = jaxpr.invars[first : first + mapping.num_inputs]
    return [number for number, variable in enumerate(inputs) if not is_used(variable, jaxpr)]


QUICK = [name for name in cases() if 'block=' not in name or name.endswith(('block=256', 'block=256 gate'))]


@needs_libtpu
@pytest.mark.parametrize(
    'name', [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in cases()]
)
def test_kernels_read_every_operand(name):
    devices = describe_devices(parse('v5e:2x2'))
    with jax.set_mesh(jax.sharding.Mesh(np.array(devices[:1]), ('data',))):
        call = cases()[name](HeadDims(HEADS, HEADS, HEAD_DIM), LENGTH)

        def step(inputs, gradient):
            o, pull = jax.vjp(call.function, *inputs)
            return o, pull(gradient)

        program = jax.make_jaxpr(step)(call.inputs, jax.eval_shape(call.function, *call.inputs))
    kernels = list(find_kernels(program.jaxpr))
    assert kernels
    unread = [find_unread(kernel) for kernel in kernels]
    assert not any(unread), unread


@pytest.mark.parametrize('branch', [True, False])
def test_an_unread_operand_is_found(branch):
    def kernel(a, b, c, o):
        o[...] = a[...]

        @pl.when(pl.program_id(0) == 0)
        def _():
            o[...] += b[...]
            if branch:
                o[...] += c[...]

    x = jnp.ones((8, 128))
    program = jax.make_jaxpr(lambda *x: pl.pallas_call(kernel, out_shape=x[0], grid=(2,))(*x))(x, x, x)
    (call,) = find_kernels(program.jaxpr)
    assert find_unread(call) == ([] if branch else [2])
