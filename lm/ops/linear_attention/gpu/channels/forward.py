"""The outputs of linear attention with a factor per key channel on Hopper GPUs, all chunks at once.

    O = (Q exp(G)) S + P V          P: `lm.ops.gpu.channel_pairs`, G: sums of the logs since the chunk's start

Other letters are explained in `plan`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.gpu import TILE, matrix, send, slice_tile, sum_products
from lm.ops.gpu.channel_pairs import LogParts, PairMemory, Selections, fade, make_factors, weigh
from lm.ops.linear_attention.gpu.channels.plan import ChannelArrays, ChannelPlan, describe_terms


class OutputMemory(NamedTuple):
    """Shared memory of a chunk: tokens, the state before it, the barrier of both, and results."""

    tokens: ChannelArrays
    before: Any
    ready: Any
    pairs: PairMemory
    out: Any


def compute(plan: ChannelPlan, tokens: ChannelArrays[jax.Array], before: jax.Array) -> jax.Array:
    """Computes outputs, bfloat16 terms [key parts, B, L, H D]; `before` holds S before each chunk, [N, L, 64]."""
    count, length, _ = before.shape

    def channel_outputs(tokens, before, out, memory: OutputMemory):
        number, rows = lax.axis_index('part'), slice_tile(lax.axis_index('chunk'))
        copy_tokens(plan, tokens, memory.tokens, number, rows, memory.ready)
        plgpu.copy_gmem_to_smem(before.at[number, rows], memory.before, memory.ready)
        plgpu.barrier_wait(memory.ready)
        q, k, v, logs = memory.tokens
        weights = weigh(q, k, logs, memory.pairs).astype(jnp.bfloat16)
        faded = fade(q, make_factors(Selections().since(), logs, memory.pairs.register))
        (o,) = sum_products([(weights, v), (faded, memory.before)], scratch=memory.pairs.register)
        send(o, memory.out, plan.slice_output_terms(out, number).at[rows])
        plgpu.wait_smem_to_gmem(0)

    tile = matrix(TILE, TILE)
    memory = OutputMemory(
        ChannelArrays(tile, tile, tile, LogParts(tile, tile)),
        tile,
        plgpu.Barrier(num_arrivals=6),
        PairMemory(tile, [tile] if plan.interpreted else []),
        tile,
    )
    (out,) = plgpu.kernel(
        channel_outputs,
        out_type=(describe_terms(plan.key_parts, tokens.q, plan.heads * plan.value_parts * TILE, jnp.bfloat16),),
        grid=(length // TILE, count),
        grid_names=('chunk', 'part'),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        scratch_types=[memory],
    )(tokens, before)
    return out


def copy_tokens(
    plan: ChannelPlan, tokens: ChannelArrays, to: ChannelArrays, number: Any, rows: Any, ready: Any
) -> None:
    """Copies a chunk's tokens of one part to shared memory; five copies arrive at `ready`."""
    slices = ChannelArrays(plan.slice_queries, plan.slice_keys, plan.slice_values, LogParts(*[plan.slice_keys] * 2))
    for source, place, find in zip(*map(jax.tree.leaves, (tokens, to, slices)), strict=True):
        plgpu.copy_gmem_to_smem(find(source, number).at[rows], place, ready)
