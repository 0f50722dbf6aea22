"""The outputs of linear attention with a factor per key channel on Hopper GPUs, all chunks at once.

    O = (Q exp(G)) S + P V          P: `lm.ops.gpu.channel_pairs`, G: sums of the logs since the chunk's start

Other letters are explained in `plan`.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.gpu import FAST, TILE, matrix, send, slice_tile, sum_products
from lm.ops.gpu.channel_pairs import Selections, fade, make_factors, weigh
from lm.ops.linear_attention.gpu.channels.plan import ChannelArrays, ChannelPlan, KernelTokens, Ref, describe_terms


def compute(plan: ChannelPlan, tokens: KernelTokens[jax.Array], before: jax.Array) -> jax.Array:
    """Computes outputs, bfloat16 terms [key parts, B, L, H D]; `before` holds S before each chunk, [N, L, 64]."""
    count, length, _ = before.shape

    def channel_outputs(tokens, before, out, *, chunk, state, ready, faded_keys, staging):
        number, rows = lax.axis_index('part'), slice_tile(lax.axis_index('chunk'))
        copy_tokens(plan, tokens, chunk, number, rows, ready)
        plgpu.copy_gmem_to_smem(before.at[number, rows], state, ready)
        plgpu.barrier_wait(ready)
        q, k, v, logs = chunk
        weights = weigh(q, k, logs, faded_keys).astype(jnp.bfloat16)
        faded = fade(q, make_factors(Selections().since(), logs))
        (o,) = sum_products([(weights, v), (faded, state)])
        send(o, staging, plan.slice_output_terms(out, number).at[rows])
        plgpu.wait_smem_to_gmem(0)

    tile = matrix(TILE, TILE)
    (out,) = plgpu.kernel(
        channel_outputs,
        out_type=(describe_terms(plan.key_parts, tokens.q, plan.heads * plan.value_parts * TILE, jnp.bfloat16),),
        grid=(length // TILE, count),
        grid_names=('chunk', 'part'),
        compiler_params=FAST,
        scratch_types={
            'chunk': ChannelArrays(tile, tile, tile, [tile, tile]),
            'state': tile,
            'ready': plgpu.Barrier(num_arrivals=6),
            'faded_keys': tile,
            'staging': tile,
        },
    )(tokens, before)
    return out


def copy_tokens(
    plan: ChannelPlan, tokens: KernelTokens[Ref], to: KernelTokens[Ref], number: jax.Array, rows: pl.Slice, ready: Ref
) -> None:
    """Copies a chunk's tokens of one part to shared memory; five copies arrive at `ready`."""
    slices = ChannelArrays(plan.slice_queries, plan.slice_keys, plan.slice_values, [plan.slice_keys] * 2)
    for source, place, find in zip(*map(jax.tree.leaves, (tokens, to, slices)), strict=True):
        plgpu.copy_gmem_to_smem(find(source, number).at[rows], place, ready)
