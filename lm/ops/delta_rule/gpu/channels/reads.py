"""The gradients that outputs give to the additions of a chunk and to the state before it, on Hopper GPUs.

    dN = Pᵀ dO          dS = (Q exp(G))ᵀ dO

The walk back over the states starts from them. P are the weights of `lm.ops.gpu.channel_pairs`. N key heads of all
sequences, G queries of each, L tokens in chunks of C. A plan of linear attention says how heads are cut into parts.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.gpu import TILE, matrix, release, send, slice_tile, sum_products
from lm.ops.gpu.channel_pairs import LogParts, PairMemory, Selections, fade, make_factors, weigh
from lm.ops.linear_attention.gpu.channels.plan import ChannelPlan, describe_terms


class ReadSources(NamedTuple):
    """Queries, bfloat16 [N, L, G E]; keys and logs, [N, L, E]; gradients of outputs, bfloat16 [N, L, G D]."""

    q: Any
    k: Any
    logs: LogParts
    do: Any


class ReadGradients(NamedTuple):
    """Terms of each query head, bfloat16: dN [key parts, N, L, G D], and dS of each chunk and part [N parts, L, 64]."""

    dnew: Any
    dstate: Any


class ReadMemory(NamedTuple):
    """Shared memory of a chunk: the sources, the barrier of their copies, operands, and results."""

    sources: ReadSources
    ready: Any
    pairs: PairMemory
    weights: Any
    out: list


def differentiate_reads(plan: ChannelPlan, sources: ReadSources) -> ReadGradients:
    """Computes the gradients of each query head."""
    n, length, _ = sources.k.shape

    def channel_delta_reads(sources, out, memory: ReadMemory):
        number, rows = lax.axis_index('part'), slice_tile(lax.axis_index('chunk'))
        find = ReadSources(plan.slice_queries, plan.slice_keys, LogParts(*[plan.slice_keys] * 2), plan.slice_outputs)
        for source, to, cut in zip(*map(jax.tree.leaves, (sources, memory.sources, find)), strict=True):
            plgpu.copy_gmem_to_smem(cut(source, number).at[rows], to, memory.ready)
        plgpu.barrier_wait(memory.ready)
        q, k, logs, do = memory.sources
        weights = weigh(q, k, logs, memory.pairs)
        since = make_factors(Selections().since(), logs, memory.pairs.register)
        release()
        memory.weights[...], memory.pairs.keys[...] = weights.astype(jnp.bfloat16), fade(q, since)
        plgpu.commit_smem()
        dnew, dstate = sum_products(
            [(memory.weights.transpose((1, 0)), do)], [(memory.pairs.keys.transpose((1, 0)), do)]
        )
        send(dnew, memory.out[0], plan.slice_output_terms(out.dnew, number).at[rows])
        send(dstate, memory.out[1], out.dstate.at[number, rows])
        plgpu.wait_smem_to_gmem(0)

    tile = matrix(TILE, TILE)
    memory = ReadMemory(
        ReadSources(tile, tile, LogParts(tile, tile), tile),
        plgpu.Barrier(num_arrivals=5),
        PairMemory(tile, [tile] if plan.interpreted else []),
        tile,
        [tile, tile],
    )
    dnew = describe_terms(plan.key_parts, sources.do, sources.do.shape[2], jnp.bfloat16)
    states = jax.ShapeDtypeStruct((n * plan.parts, length, TILE), jnp.bfloat16)
    (gradients,) = plgpu.kernel(
        channel_delta_reads,
        out_type=(ReadGradients(dnew, states),),
        grid=(length // TILE, n * plan.parts),
        grid_names=('chunk', 'part'),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        scratch_types=[memory],
    )(sources)
    return gradients
