"""The TPU kernels of the sketch networks: a node of the tree, forward and backward.

M input size, E hidden units, r outputs, T tokens of a tile, S the networks' inputs: 1 where both read the same, else 2.
Arrays in HBM are [B, H, rows, L], feature by token, as the attention kernels want them; tokens fill the 128 lanes.

The layer normalizations' scale and bias are folded into the map that follows, which meets the standardized input plus
`OFFSET`. The hidden layers exist only tile by tile in VMEM. The backward kernel computes the hidden layers of one tile
again beside the gradients of the tile before it. It adds up the gradients of the weights in float32, in blocks that
stay in VMEM.
"""

import functools
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lm.ops.sketch_networks.folding import LevelMaps
from lm.ops.sketch_networks.tpu.plan import NodePlan
from lm.ops.sketch_networks.tpu.tiles import (
    Kept,
    ahead,
    behind,
    first_level,
    interleave,
    kept_shapes,
    packed,
    second_level,
)
from lm.ops.sketch_networks.types import ByLevel

Held = TypeVar('Held')
Inputs = tuple[jax.Array, ...]
"""S arrays [B, N · G, M, L]."""


def forward(plan: NodePlan, inputs: Inputs, maps: ByLevel[LevelMaps[jax.Array]]) -> jax.Array:
    """Returns ψ, [B, N · G, r, L].

    Args:
        plan: L is a multiple of its block times its parts.
        inputs: vectors.
        maps: with the wide ones halved.
    """
    (r, hidden), dtype, block = maps.upper.narrow.shape[2:], inputs[0].dtype, plan.forward_tile
    output = jax.ShapeDtypeStruct((*inputs[0].shape[:2], r, inputs[0].shape[3]), dtype)
    ys = tuple(pltpu.VMEM((r, block), dtype) for _ in range(2))
    units = ByLevel(*(tuple(packed(hidden, block, dtype) for _ in range(2)) for _ in range(2)))
    return pl.pallas_call(
        functools.partial(_forward_kernel, plan),
        name='sketch_networks_forward',
        grid=(maps.lower.wide_Nx2xExM.shape[0], plan.parts, _steps(plan, inputs[0], block) + 1),
        in_specs=[tuple(_tokens(plan, a, block) for a in inputs), jax.tree.map(_whole, maps)],
        out_specs=_tokens(plan, output, block, late=1),
        out_shape=_flat(output),
        scratch_shapes=(ys, units),
        compiler_params=_compiler_params(plan),
        cost_estimate=_cost(1, maps, (*inputs, output)),
    )(jax.tree.map(_by_row, inputs), maps).reshape(output.shape)


class _Read(NamedTuple, Generic[Held]):
    """The arrays that the backward kernel reads, and refs and block specs of them.

    Attributes:
        inputs: vectors.
        dpsi: the gradient of ψ.
        others: of each input a gradient from elsewhere, to which its own is added; None: there is none.
        maps: as in the forward pass.
        turned: the maps with their last two axes swapped.
    """

    inputs: tuple[Held, ...]
    dpsi: Held
    others: tuple[Held | None, ...]
    maps: ByLevel[LevelMaps[Held]]
    turned: ByLevel[LevelMaps[Held]]


def backward(
    plan: NodePlan,
    inputs: Inputs,
    maps: ByLevel[LevelMaps[jax.Array]],
    dpsi: jax.Array,
    others: tuple[jax.Array | None, ...],
) -> tuple[Inputs, ByLevel[LevelMaps[jax.Array]]]:
    """Returns the gradients of the inputs and, in float32 and for each of plan.parts, of the maps.

    Args:
        plan: as in the forward pass.
        inputs: as in the forward pass.
        maps: as in the forward pass.
        dpsi: the gradient of ψ.
        others: gradients that the inputs have from elsewhere, to which theirs are added.

    Returns:
        S arrays like the inputs; then [N, parts, 2, M, E] and [N, parts, 2, r, E] for each level, the gradients of the
        wide maps with swapped axes.
    """
    n, hidden, size = maps.lower.wide_Nx2xExM.shape[0], *maps.lower.wide_Nx2xExM.shape[2:]
    r, dtype = maps.lower.narrow.shape[2], inputs[0].dtype
    turned = jax.tree.map(lambda m: m.swapaxes(2, 3), maps)

    def parts_of(level: LevelMaps[jax.Array]) -> LevelMaps[jax.ShapeDtypeStruct]:
        wide, narrow = level.wide_Nx2xExM.shape, level.narrow.shape
        shapes = ((2, wide[3], wide[2]), narrow[1:])
        return LevelMaps(*(jax.ShapeDtypeStruct((n, plan.parts, *shape), jnp.float32) for shape in shapes))

    sums = ByLevel(parts_of(maps.lower), parts_of(maps.upper))
    outputs = (tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in inputs), sums)
    read = _Read(jax.tree.map(_by_row, inputs), _by_row(dpsi), jax.tree.map(_by_row, others), maps, turned)
    specs = _Read(
        tuple(_tokens(plan, a, plan.block) for a in inputs),
        _tokens(plan, dpsi, plan.block),
        tuple(None if a is None else _tokens(plan, a, plan.block, late=1) for a in others),
        jax.tree.map(_whole, maps),
        jax.tree.map(_whole, turned),
    )
    kept = kept_shapes(plan, len(inputs), size, hidden, r, dtype)
    dzs = ByLevel(*(tuple(packed(hidden, plan.tile, dtype) for _ in range(2)) for _ in range(2)))
    waiting = tuple(pltpu.VMEM((size, plan.block - plan.tile), dtype) for _ in inputs)
    dxs, dmaps = pl.pallas_call(
        functools.partial(_backward_kernel, plan),
        name='sketch_networks_backward',
        grid=(n, plan.parts, _steps(plan, inputs[0], plan.block) + 1),
        in_specs=[specs],
        out_specs=[
            tuple(_tokens(plan, a, plan.block, late=1) for a in inputs),
            jax.tree.map(lambda a: pl.BlockSpec((None, None, *a.shape[2:]), lambda i, p, s: (i, p, 0, 0, 0)), sums),
        ],
        out_shape=[tuple(map(_flat, outputs[0])), sums],
        scratch_shapes=(waiting, kept, kept, dzs),
        compiler_params=_compiler_params(plan),
        cost_estimate=_cost(3, maps, (*inputs, dpsi, *jax.tree.leaves((others, outputs)))),
    )(read)
    return tuple(dx.reshape(x.shape) for dx, x in zip(dxs, inputs, strict=True)), dmaps


def _steps(plan: NodePlan, x_BxHxMxL: jax.Array | jax.ShapeDtypeStruct, block: int) -> int:
    """Returns the blocks of all heads that share a sketch, of the whole batch and of one part."""
    batch, _, _, length = x_BxHxMxL.shape
    return batch * plan.heads * (length // (block * plan.parts))


def _tokens(plan: NodePlan, a_BxHxFxL: jax.Array | jax.ShapeDtypeStruct, block: int, late: int = 0) -> pl.BlockSpec:
    """Returns a block of tokens per step, the one of `late` steps ago; steps go through blocks, heads and batch.

    Batch and heads are one axis, and divisions are shifts where they can be: what scalars are computed from, the units
    wait for at the beginning of each step.
    """
    blocks, steps = a_BxHxFxL.shape[3] // (block * plan.parts), _steps(plan, a_BxHxFxL, block)
    n = a_BxHxFxL.shape[1] // plan.heads

    def index(i, p, s):
        row, j = _divide(jnp.clip(s - late, 0, steps - 1) if late else jnp.minimum(s, steps - 1), blocks)
        if n > 1:
            b, h = _divide(row, plan.heads)
            row = (b * n + i) * plan.heads + h
        return row, 0, p * blocks + j

    return pl.BlockSpec((None, a_BxHxFxL.shape[2], block), index)


def _divide(a: jax.Array, by: int) -> tuple[jax.Array, jax.Array]:
    if by & (by - 1):
        return lax.div(a, by), lax.rem(a, by)
    return lax.shift_right_logical(a, by.bit_length() - 1), a & (by - 1)


def _flat(a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((a.shape[0] * a.shape[1], *a.shape[2:]), a.dtype)


def _by_row(a_BxHxFxL: jax.Array) -> jax.Array:
    return a_BxHxFxL.reshape(-1, *a_BxHxFxL.shape[2:])


def _whole(a_NxAxBxC: jax.Array) -> pl.BlockSpec:
    return pl.BlockSpec((None, *a_NxAxBxC.shape[1:]), lambda i, p, s: (i, 0, 0, 0))


def _compiler_params(plan: NodePlan) -> pltpu.CompilerParams:
    return pltpu.CompilerParams(
        dimension_semantics=('parallel', 'parallel', 'arbitrary'), vmem_limit_bytes=plan.vmem_limit_bytes
    )


def _cost(passes: int, maps: ByLevel[LevelMaps[jax.Array]], arrays: tuple) -> pl.CostEstimate:
    batch, heads, _, length = arrays[0].shape
    vectors = batch * heads * length
    weights = sum(m[0].size for m in jax.tree.leaves(maps))
    hidden = 2 * sum(level.wide_Nx2xExM.shape[2] for level in maps)
    return pl.CostEstimate(
        flops=2 * passes * vectors * weights,
        transcendentals=vectors * hidden,
        bytes_accessed=sum(a.size * a.dtype.itemsize for a in (*arrays, *jax.tree.leaves(maps))),
    )


def _forward_kernel(
    plan: NodePlan, inputs: tuple[jax.Ref, ...], maps: ByLevel[LevelMaps[jax.Ref]], psi: jax.Ref, ys, units: ByLevel
) -> None:
    """Computes the first level of a tile, beside the second level of the tile of the step before."""
    interleave(
        second_level(plan, [y[...] for y in ys], maps.upper, units.upper, psi),
        first_level(plan, [x[...] for x in inputs], maps.lower, units.lower, ys),
    )


def _backward_kernel(
    plan: NodePlan,
    read: _Read[jax.Ref],
    dxs: tuple[jax.Ref, ...],
    sums: ByLevel[LevelMaps[jax.Ref]],
    waiting: tuple[jax.Ref, ...],
    kept: Kept,
    kept_too: Kept,
    dzs: ByLevel,
) -> None:
    """Computes a step's tiles from left to right, and beside each the backward pass of the tile before it.

    For the first tile that is the last one of the step before. So a block's gradients are complete a step late. The
    first step's backward pass has read nothing: its sums are not kept.
    """
    step, last = pl.program_id(2), plan.block - plan.tile
    counts = (step < pl.num_programs(2) - 1).astype(jnp.float32)
    for dx, before, other in zip(dxs, waiting, read.others, strict=True):
        dx[:, :last] = before[...] if other is None else before[...] + other[:, :last]
    for i, at in enumerate(range(0, plan.block, plan.tile)):
        tokens, before = slice(at, at + plan.tile), slice(at - plan.tile, at)
        mine, previous = (kept, kept_too) if i % 2 == 0 else (kept_too, kept)
        into = [dx.at[:, last:] for dx in dxs] if i == 0 else [dx.at[:, before] for dx in waiting]
        beside = [other.at[:, last:] if other is not None and i == 0 else None for other in read.others]
        fresh = step == 0 if i == 0 else None
        interleave(
            behind(plan, previous, read.turned, into, beside, sums, dzs, fresh),
            ahead(plan, [x[:, tokens] for x in read.inputs], read.dpsi[:, tokens], counts, read.maps, mine),
        )
