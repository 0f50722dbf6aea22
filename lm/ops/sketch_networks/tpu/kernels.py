"""The TPU kernels of the sketch networks: a node of the tree, forward and backward.

M input size, E hidden units, r outputs, T tokens of a tile, S the networks' inputs: 1 where both read the same, else 2.
Arrays in HBM are [B, H, rows, L], feature by token, as the attention kernels want them; tokens fill the 128 lanes.

The layer normalizations' scale and bias are folded into the map that follows, which meets the standardized input plus
`OFFSET`. The hidden layers exist only tile by tile in VMEM. The backward kernel computes them again, those of one tile
beside the gradients of the tile before it, and adds up the gradients of the weights in float32, in blocks that stay in
VMEM.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lm.ops.sketch_networks.tpu.plan import NodePlan
from lm.ops.sketch_networks.tpu.tiles import (
    Kept,
    ahead,
    behind,
    first_level,
    kept_shapes,
    packed,
    second_level,
    together,
)


def forward(plan: NodePlan, inputs: Sequence[jax.Array], maps: Sequence[jax.Array]) -> jax.Array:
    """ψ, [B, N · G, r, L].

    Args:
        plan: L is a multiple of its block times its parts.
        inputs: S arrays [B, N · G, M, L].
        maps: [N, 2, E, M], [N, 2, r, E], [N, 2, E, r], [N, 2, r, E]; the first and third halved.
    """
    (r, hidden), dtype, block = maps[-1].shape[2:], inputs[0].dtype, plan.forward_tile
    output = jax.ShapeDtypeStruct((*inputs[0].shape[:2], r, inputs[0].shape[3]), dtype)
    ys = tuple(pltpu.VMEM((r, block), dtype) for _ in range(2))
    units = tuple(packed(hidden, block, dtype) for _ in range(4))
    return pl.pallas_call(
        functools.partial(_forward_kernel, plan, len(inputs)),
        name='sketch_networks_forward',
        grid=(maps[0].shape[0], plan.parts, _steps(plan, inputs[0], block) + 1),
        in_specs=[_tokens(plan, a, block) for a in inputs] + [_whole(a) for a in maps],
        out_specs=_tokens(plan, output, block, late=1),
        out_shape=_flat(output),
        scratch_shapes=(ys, units),
        compiler_params=_compiler_params(plan),
        cost_estimate=_cost(1, maps, (*inputs, output)),
    )(*map(_by_row, inputs), *maps).reshape(output.shape)


def backward(
    plan: NodePlan,
    inputs: Sequence[jax.Array],
    maps: Sequence[jax.Array],
    dpsi: jax.Array,
    others: Sequence[jax.Array | None],
) -> list[jax.Array]:
    """The gradients of the inputs and, in float32 and for each of plan.parts, of the maps.

    Args:
        others: gradients that the inputs have from elsewhere, to which theirs are added.

    Returns:
        S arrays like the inputs; then [N, parts, 2, M, E], [N, parts, 2, r, E], [N, parts, 2, r, E] and
        [N, parts, 2, r, E]: those of the halved maps turned over.
    """
    n, (size, dtype) = maps[0].shape[0], (inputs[0].shape[2], inputs[0].dtype)
    r, hidden = maps[1].shape[2:]
    turned = [m.swapaxes(2, 3) for m in maps]
    shapes = [m.shape[1:] if i % 2 else (2, m.shape[3], m.shape[2]) for i, m in enumerate(maps)]
    sums = [jax.ShapeDtypeStruct((n, plan.parts, *shape), jnp.float32) for shape in shapes]
    outputs = [*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in inputs), *sums]
    read = (*maps, *turned)
    kept = kept_shapes(plan, len(inputs), size, hidden, r, dtype)
    dzs = tuple(packed(hidden, plan.tile, dtype) for _ in range(4))
    waiting = tuple(pltpu.VMEM((size, plan.block - plan.tile), dtype) for _ in inputs)
    added = [a for a in others if a is not None]
    dxs_and_sums = pl.pallas_call(
        functools.partial(_backward_kernel, plan, [a is not None for a in others]),
        name='sketch_networks_backward',
        grid=(n, plan.parts, _steps(plan, inputs[0], plan.block) + 1),
        in_specs=[_tokens(plan, a, plan.block) for a in (*inputs, dpsi)]
        + [_tokens(plan, a, plan.block, late=1) for a in added]
        + [_whole(a) for a in read],
        out_specs=[_tokens(plan, a, plan.block, late=1) for a in inputs]
        + [pl.BlockSpec((None, None, *a.shape[2:]), lambda i, p, s: (i, p, 0, 0, 0)) for a in sums],
        out_shape=[*map(_flat, outputs[: len(inputs)]), *sums],
        scratch_shapes=(waiting, kept, kept, dzs),
        compiler_params=_compiler_params(plan),
        cost_estimate=_cost(3, maps, (*inputs, dpsi, *added, *outputs)),
    )(*map(_by_row, (*inputs, dpsi, *added)), *read)
    return [a.reshape(o.shape) for a, o in zip(dxs_and_sums, outputs, strict=True)]


def _steps(plan: NodePlan, x_BxHxMxL: jax.Array, block: int) -> int:
    """Blocks of all heads that share a sketch, of the whole batch and of one part."""
    batch, _, _, length = x_BxHxMxL.shape
    return batch * plan.heads * (length // (block * plan.parts))


def _tokens(plan: NodePlan, a_BxHxFxL, block: int, late: int = 0) -> pl.BlockSpec:
    """A block of tokens a step, that of the step `late` steps ago; steps go through blocks, heads and batch.

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


def _cost(passes: int, maps: Sequence[jax.Array], arrays) -> pl.CostEstimate:
    batch, heads, _, length = arrays[0].shape
    vectors = batch * heads * length
    weights, hidden = sum(m[0].size for m in maps), 2 * sum(m.shape[2] for m in maps[::2])
    return pl.CostEstimate(
        flops=2 * passes * vectors * weights,
        transcendentals=vectors * hidden,
        bytes_accessed=sum(a.size * a.dtype.itemsize for a in (*arrays, *maps)),
    )


def _forward_kernel(plan: NodePlan, n_inputs: int, *refs):
    """The first level of a tile, beside the second level of the tile of the step before."""
    inputs, maps, (psi, ys, units) = refs[:n_inputs], refs[n_inputs : n_inputs + 4], refs[n_inputs + 4 :]
    together(
        second_level(plan, [y[...] for y in ys], maps[2:], units[2:], psi),
        first_level(plan, [x[...] for x in inputs], maps[:2], units[:2], ys),
    )


def _backward_kernel(plan: NodePlan, added: Sequence[bool], *refs):
    """A step's tiles from left to right: what the backward pass of one needs, beside the backward pass of the tile
    before it, which for the first is the last tile of the step before. So a block's gradients are complete a step late,
    and the first step's backward pass has read nothing: what it adds is not kept."""
    n_inputs = len(added)
    inputs, dpsi, refs = refs[:n_inputs], refs[n_inputs], list(refs[n_inputs + 1 :])
    others = [refs.pop(0) if there else None for there in added]
    maps, turned, dxs, sums, (waiting, *kept, dzs) = (
        refs[:4], refs[4:8], refs[8 : 8 + n_inputs], refs[8 + n_inputs : 12 + n_inputs], refs[12 + n_inputs :]
    )  # fmt: skip
    step, last = pl.program_id(2), plan.block - plan.tile
    counts = (step < pl.num_programs(2) - 1).astype(jnp.float32)
    for dx, before, other in zip(dxs, waiting, others, strict=True):
        dx[:, :last] = before[...] if other is None else before[...] + other[:, :last]
    for i, at in enumerate(range(0, plan.block, plan.tile)):
        tokens, before = slice(at, at + plan.tile), slice(at - plan.tile, at)
        into = [dx.at[:, last:] for dx in dxs] if i == 0 else [dx.at[:, before] for dx in waiting]
        beside = [other.at[:, last:] if other is not None and i == 0 else None for other in others]
        fresh = step == 0 if i == 0 else None
        together(
            behind(plan, Kept(*kept[(i + 1) % 2]), turned, into, beside, sums, dzs, fresh),
            ahead(plan, [x[:, tokens] for x in inputs], dpsi[:, tokens], counts, maps, Kept(*kept[i % 2])),
        )
