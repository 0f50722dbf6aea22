"""The gradients that outputs give to the additions of a chunk and to the state before it, on Hopper GPUs.

    dN = Pᵀ dO          dS = (Q exp(G))ᵀ dO

The walk back over the states starts from them. P are the weights of `lm.ops.gpu.channel_pairs`. N key heads of all
sequences, G queries of each, L tokens in chunks of C. A plan of linear attention says how heads are cut into parts.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.gpu import FAST, TILE, matrix, release, send, slice_tile, sum_products
from lm.ops.gpu.channel_pairs import Selections, fade, make_factors, weigh
from lm.ops.linear_attention.gpu.channels.plan import ChannelPlan, describe_terms


def differentiate_reads(
    plan: ChannelPlan, *, q: jax.Array, k: jax.Array, logs: list[jax.Array], do: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes the gradients of each query head.

    Args:
        q: queries, bfloat16 [N, L, G E].
        k: keys, bfloat16 [N, L, E].
        logs: logs of the factors, two arrays [N, L, E] whose sum they are.
        do: gradients of outputs, bfloat16 [N, L, G D].

    Returns:
        Terms of each query head, bfloat16: dN [key parts, N, L, G D], and dS of each chunk and part [N parts, L, 64].
    """
    n, length, _ = k.shape

    def channel_delta_reads(q, k, logs, do, dnew, dstate, *, chunk, ready, faded, weights, staging):
        number, rows = lax.axis_index('part'), slice_tile(lax.axis_index('chunk'))
        find = plan.slice_queries, plan.slice_keys, [plan.slice_keys] * 2, plan.slice_outputs
        for source, to, cut in zip(*map(jax.tree.leaves, ((q, k, logs, do), chunk, find)), strict=True):
            plgpu.copy_gmem_to_smem(cut(source, number).at[rows], to, ready)
        plgpu.barrier_wait(ready)
        q, k, logs, do = chunk
        found = weigh(q, k, logs, faded)
        since = make_factors(Selections().since(), logs)
        release()
        weights[...], faded[...] = found.astype(jnp.bfloat16), fade(q, since)
        plgpu.commit_smem()
        gradients = sum_products([(weights.transpose((1, 0)), do)], [(faded.transpose((1, 0)), do)])
        places = plan.slice_output_terms(dnew, number), dstate.at[number]
        for gradient, place, to in zip(gradients, staging, places, strict=True):
            send(gradient, place, to.at[rows])
        plgpu.wait_smem_to_gmem(0)

    tile = matrix(TILE, TILE)
    dnew, dstate = plgpu.kernel(
        channel_delta_reads,
        out_type=(
            describe_terms(plan.key_parts, do, do.shape[2], jnp.bfloat16),
            jax.ShapeDtypeStruct((n * plan.parts, length, TILE), jnp.bfloat16),
        ),
        grid=(length // TILE, n * plan.parts),
        grid_names=('chunk', 'part'),
        compiler_params=FAST,
        scratch_types={
            'chunk': (tile, tile, [tile, tile], tile),
            'ready': plgpu.Barrier(num_arrivals=5),
            'faded': tile,
            'weights': tile,
            'staging': [tile, tile],
        },
    )(q, k, logs, do)
    return dnew, dstate
