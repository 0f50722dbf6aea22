"""The gradients of linear attention with a factor per key channel on Hopper GPUs, all chunks at once.

P is computed again. S stands before the chunk and S' after it; dX is the gradient of X.

    dV = Pᵀ dO + (K exp(R)) dS'        dP = dO Vᵀ        R: sums of the logs until the chunk's end

Each level gives gradients to queries, to keys and to its F. Every F is a sum of logs, so the gradients of the logs are
products with the same zeros and ones, transposed. Other letters are explained in the forward kernel.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.gpu import FAST, TILE, matrix, product, release, send, slice_tile, sum_products, wait_for_copies, widen
from lm.ops.gpu.channel_pairs import (
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
)
from lm.ops.linear_attention.gpu.channels.forward import copy_tokens
from lm.ops.linear_attention.gpu.channels.plan import ChannelArrays, ChannelPlan, KernelTokens, Ref, describe_terms


def differentiate(
    plan: ChannelPlan, tokens: KernelTokens[jax.Array], *, do: jax.Array, before: jax.Array, dafter: jax.Array
) -> ChannelArrays[jax.Array, jax.Array]:
    """Computes the gradients of all tokens.

    Args:
        do: gradients of outputs, [B, L, H D].
        before: S before each chunk, [N, L, 64].
        dafter: gradients of S after each chunk, [N, L, 64].

    Returns:
        Terms of the gradients of each query head's tokens: bfloat16, and float32 for the logs. Terms of values are
        [key parts, B, L, H D], and all others [value parts, B, L, H E].
    """
    count, length, _ = before.shape

    def channel_gradients(tokens, do, before, dafter, out, *, chunk, chunk_do, states, ready, scratch, staging):
        number, rows = lax.axis_index('part'), slice_tile(lax.axis_index('chunk'))
        copy_tokens(plan, tokens, chunk, number, rows, ready)
        plgpu.copy_gmem_to_smem(plan.slice_outputs(do, number).at[rows], chunk_do, ready)
        for source, to in zip((before, dafter), states, strict=True):
            plgpu.copy_gmem_to_smem(source.at[number, rows], to, ready)
        plgpu.barrier_wait(ready)
        dv = _differentiate_values(chunk, chunk_do, states[1], scratch)
        send(dv, staging, plan.slice_output_terms(out.v, number).at[rows])
        dq, dk = _differentiate_keys(chunk, chunk_do, states, scratch)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(scratch.dlog, plan.slice_key_terms(out.logs, number).at[rows])
        for value, to in ((dq, out.q), (dk, out.k)):
            wait_for_copies()
            release()
            send(value, staging, plan.slice_key_terms(to, number).at[rows])
        plgpu.wait_smem_to_gmem(0)

    tile, keys = matrix(TILE, TILE), plan.heads * plan.key_parts * TILE
    of_keys = describe_terms(plan.value_parts, tokens.q, keys, jnp.bfloat16)
    of_values = describe_terms(plan.key_parts, tokens.q, plan.heads * plan.value_parts * TILE, jnp.bfloat16)
    of_logs = describe_terms(plan.value_parts, tokens.q, keys, jnp.float32)
    (gradients,) = plgpu.kernel(
        channel_gradients,
        out_type=(ChannelArrays(of_keys, of_keys, of_values, of_logs),),
        grid=(length // TILE, count),
        grid_names=('chunk', 'part'),
        compiler_params=FAST,
        scratch_types={
            'chunk': ChannelArrays(tile, tile, tile, [tile, tile]),
            'chunk_do': tile,
            'states': [tile, tile],
            'ready': plgpu.Barrier(num_arrivals=8),
            'scratch': PairGradientMemory.allocate(),
            'staging': tile,
        },
    )(tokens, do, before, dafter)
    return gradients


def _differentiate_values(chunk: KernelTokens[Ref], do: Ref, dafter: Ref, scratch: PairGradientMemory) -> jax.Array:
    """Computes dV, float32 [C, 64]."""
    q, k, _, logs = chunk
    weights = weigh(q, k, logs, scratch.keys)
    until = make_factors(Selections().until(), logs)
    release()
    scratch.weights[...], scratch.keys[...] = weights.astype(jnp.bfloat16), fade(k, until)
    plgpu.commit_smem()
    return sum_products([(scratch.weights.transpose((1, 0)), do), (scratch.keys, dafter)])[0]


def _differentiate_keys(
    chunk: KernelTokens[Ref], do: Ref, states: list[Ref], scratch: PairGradientMemory
) -> tuple[jax.Array, jax.Array]:
    """Computes dQ and dK, and places the gradients of the logs in `scratch.dlog`.

    `states` are S before the chunk, and the gradient of S after it. Once it is read, dO gives its place to dP.
    """
    (q, k, v, logs), (before, dafter) = chunk, states
    select, turned = Selections(), Selections(transposed=True)
    # Through S', and through the queries' reads of S.
    halves = place_halves(widen(before) * widen(dafter), scratch)
    kept = add_selected(select.whole(), [x.transpose((1, 0)) for x in halves])
    scratch.dlog[...] = kept * make_factors(select.whole(), logs)
    dq = product(do, before.transpose((1, 0))) * make_factors(select.since(), logs)
    add_log_gradients(turned.since(), dq * widen(q), scratch)
    dk = product(v, dafter.transpose((1, 0))) * make_factors(select.until(), logs)
    add_log_gradients(turned.until(), dk * widen(k), scratch)
    dpairs = product(do, v.transpose((1, 0)))
    release()
    do[...] = dpairs.astype(jnp.bfloat16)
    own = take_own(dpairs).astype(jnp.bfloat16)
    dq, dk = (x + product(own, y) for x, y in ((dq, k), (dk, q)))
    return differentiate_pairs(q, k, logs, do, scratch, (dq, dk))
