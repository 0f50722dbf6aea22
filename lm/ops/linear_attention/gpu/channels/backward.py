"""The gradients of linear attention with a factor per key channel on Hopper GPUs, all chunks at once.

P is computed again. S stands before the chunk and S' after it; dX is the gradient of X.

    dV = Pᵀ dO + (K exp(R)) dS'        dP = dO Vᵀ        R: sums of the logs until the chunk's end

Each level gives gradients to queries, to keys and to its F. Every F is a sum of logs, so the gradients of the logs are
products with the same zeros and ones, transposed. Other letters are explained in the forward kernel.
"""

from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.gpu import TILE, matrix, product, release, send, slice_tile, sum_products, wait_for_copies
from lm.ops.gpu.channel_pairs import (
    LogParts,
    PairGradientMemory,
    Selections,
    add_log_gradients,
    add_selected,
    differentiate_pairs,
    fade,
    make_factors,
    place_halves,
    take_own,
    weigh,
    widen,
)
from lm.ops.linear_attention.gpu.channels.forward import copy_tokens
from lm.ops.linear_attention.gpu.channels.plan import A, ChannelArrays, ChannelPlan, describe_terms


class GradientSources(NamedTuple, Generic[A]):
    """The arrays that a chunk's gradients need.

    Attributes:
        tokens: tokens.
        do: gradients of outputs, [B, L, H D].
        before: S before each chunk, [N, L, 64].
        dafter: gradients of S after each chunk, [N, L, 64].
    """

    tokens: ChannelArrays[A]
    do: A
    before: A
    dafter: A


class ChannelGradients(NamedTuple, Generic[A]):
    """Terms of the gradients of each query head's tokens: bfloat16, and float32 for the logs.

    Attributes:
        dq, dk, dlog: [value parts, B, L, H E].
        dv: [key parts, B, L, H D].
    """

    dq: A
    dk: A
    dv: A
    dlog: A


class GradientMemory(NamedTuple):
    """Shared memory of a chunk.

    Attributes:
        sources: what is copied.
        ready: the barrier of the copies.
        scratch: memory of the gradients of pairs.
        out: where results are placed.
    """

    sources: GradientSources
    ready: Any
    scratch: PairGradientMemory
    out: Any


def differentiate(plan: ChannelPlan, sources: GradientSources[jax.Array]) -> ChannelGradients[jax.Array]:
    """Computes the gradients of all tokens."""
    count, length, _ = sources.before.shape

    def channel_gradients(sources, out, memory: GradientMemory):
        number, rows = lax.axis_index('part'), slice_tile(lax.axis_index('chunk'))
        copied = memory.sources
        copy_tokens(plan, sources.tokens, copied.tokens, number, rows, memory.ready)
        plgpu.copy_gmem_to_smem(plan.slice_outputs(sources.do, number).at[rows], copied.do, memory.ready)
        plgpu.copy_gmem_to_smem(sources.before.at[number, rows], copied.before, memory.ready)
        plgpu.copy_gmem_to_smem(sources.dafter.at[number, rows], copied.dafter, memory.ready)
        plgpu.barrier_wait(memory.ready)
        send(_differentiate_values(memory), memory.out, plan.slice_output_terms(out.dv, number).at[rows])
        dq, dk = _differentiate_keys(memory)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(memory.scratch.dlog, plan.slice_key_terms(out.dlog, number).at[rows])
        for value, to in ((dq, out.dq), (dk, out.dk)):
            wait_for_copies()
            release()
            send(value, memory.out, plan.slice_key_terms(to, number).at[rows])
        plgpu.wait_smem_to_gmem(0)

    tile, keys = matrix(TILE, TILE), plan.heads * plan.key_parts * TILE
    memory = GradientMemory(
        GradientSources(ChannelArrays(tile, tile, tile, LogParts(tile, tile)), tile, tile, tile),
        plgpu.Barrier(num_arrivals=8),
        PairGradientMemory.allocate(plan.interpreted),
        tile,
    )
    of_keys = describe_terms(plan.value_parts, sources.tokens.q, keys, jnp.bfloat16)
    of_values = describe_terms(plan.key_parts, sources.tokens.q, plan.heads * plan.value_parts * TILE, jnp.bfloat16)
    of_logs = describe_terms(plan.value_parts, sources.tokens.q, keys, jnp.float32)
    (gradients,) = plgpu.kernel(
        channel_gradients,
        out_type=(ChannelGradients(of_keys, of_keys, of_values, of_logs),),
        grid=(length // TILE, count),
        grid_names=('chunk', 'part'),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        scratch_types=[memory],
    )(sources)
    return gradients


def _differentiate_values(memory: GradientMemory) -> jax.Array:
    """Computes dV, float32 [C, 64]."""
    (q, k, _, logs), do, _, dafter = memory.sources
    scratch = memory.scratch
    weights = weigh(q, k, logs, scratch.pairs)
    until = make_factors(Selections().until(), logs, scratch.pairs.register)
    release()
    scratch.weights[...], scratch.pairs.keys[...] = weights.astype(jnp.bfloat16), fade(k, until)
    plgpu.commit_smem()
    return sum_products([(scratch.weights.transpose((1, 0)), do), (scratch.pairs.keys, dafter)])[0]


def _differentiate_keys(memory: GradientMemory) -> tuple[jax.Array, jax.Array]:
    """Computes dQ and dK, and places the gradients of the logs in `memory.scratch.dlog`.

    Once it is read, dO gives its place to dP.
    """
    (q, k, v, logs), do, before, dafter = memory.sources
    scratch, register = memory.scratch, memory.scratch.pairs.register
    select, turned = Selections(), Selections(transposed=True)
    # Through S', and through the queries' reads of S.
    halves = place_halves(widen(before) * widen(dafter), scratch)
    kept = add_selected(select.whole(), LogParts(*(x.transpose((1, 0)) for x in halves)), register)
    scratch.dlog[...] = kept * make_factors(select.whole(), logs, register)
    dq = product(do, before.transpose((1, 0))) * make_factors(select.since(), logs, register)
    add_log_gradients(turned.since(), dq * widen(q), scratch)
    dk = product(v, dafter.transpose((1, 0))) * make_factors(select.until(), logs, register)
    add_log_gradients(turned.until(), dk * widen(k), scratch)
    dpairs = product(do, v.transpose((1, 0)))
    release()
    do[...] = dpairs.astype(jnp.bfloat16)
    own = take_own(dpairs).astype(jnp.bfloat16)
    dq, dk = (x + sum_products([(own, y)], scratch=register)[0] for x, y in ((dq, k), (dk, q)))
    return differentiate_pairs(q, k, logs, do, scratch, (dq, dk))
