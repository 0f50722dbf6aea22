"""Gated units of models of several widths, with layer normalization. A head stands for 64 numbers of the width."""

import functools

import jax
import jax.numpy as jnp

from lm.attention import HeadDims
from lm.ops.gated_units import Norm, gated_units
from lm.ops.gated_units.tpu import find_tile
from scripts.kernels.cases.base import Case, KernelCall

WIDTHS = {'gated units': 768, 'gated units, medium': 1024, 'gated units, large': 1280}


def cases() -> dict[str, Case]:
    return {name: functools.partial(units_call, width) for name, width in WIDTHS.items()}


def units_call(width: int, dims: HeadDims, length: int) -> KernelCall:
    """Returns one call with the usual number of units, in bfloat16."""
    units = 8 * width // 3 // 8 * 8
    tile, step = find_tile(length, width, units)
    work = width / 64 * tile / -(-units // step)
    steps = {(name, f'gated_units_{name}'): work for name in ('forward', 'backward')}
    shapes = ((1, length, width), (width, 2 * units), (units, width))
    arrays = tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    gain = jax.ShapeDtypeStruct((width,), jnp.float32)

    def function(x, into, out, norm):
        return gated_units(x, into, out, norm=norm, implementation='pallas_tpu')

    return KernelCall(function, (*arrays, Norm(gain, gain, centred=True, epsilon=1e-5)), steps)
