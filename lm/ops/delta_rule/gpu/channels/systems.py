"""The triangular systems of chunks whose key channels have factors of their own, on Hopper GPUs.

    X = (I + A)⁻¹     A_ij = β_i w_ij, j < i     w: `lm.ops.gpu.channel_pairs`, of keys with keys

The inverse is made as in `lm.ops.delta_rule.gpu.systems`. G are sums of the logs since the chunk's start. N key heads
of all sequences, L tokens in chunks of C, E key size, D value size. C is TILE, and keys and values are in parts of TILE
numbers.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.delta_rule.gpu.systems import Ref, pair_turned, solve_systems
from lm.ops.dots import in_parts
from lm.ops.gpu import (
    FAST,
    TILE,
    load_columns,
    load_rows,
    matrix,
    release,
    repeat_per_column,
    repeat_per_row,
    send,
    slice_tile,
    wait_for_copies,
    zeros,
)
from lm.ops.gpu.channel_pairs import (
    PairGradientMemory,
    Selections,
    differentiate_pairs,
    fade,
    make_factors,
    weigh_earlier,
)
from lm.ops.linear_attention.gpu.channels.plan import KernelTokens


def solve(system: KernelTokens[jax.Array], beta_NxL: jax.Array, v_NxLxD: jax.Array) -> list[jax.Array]:
    """Computes X diag(β) V and -X diag(β) (K exp(G)), bfloat16 [N, L, D] and [N, L, E].

    A is made of the keys and the logs of `system`, and of β, float32.
    """

    def pair(x: jax.Array, *, keys, factors, scalars, **_):
        for k, logs in keys:
            since = make_factors(Selections().since(), logs)
            release()
            k[...] = fade(k, since)
        plgpu.commit_smem()
        scale = load_columns(scalars[0])
        values, of_keys = (in_parts(x * repeat_per_column(factor, TILE), 2) for factor in (scale, -scale))
        return [(values, factors[0]), (of_keys, [k for k, _ in keys])]

    tokens = (system.k, system.logs), [beta_NxL], [v_NxLxD]
    return solve_systems('channel_delta_solutions', *tokens, _locate, _make_system, pair, [matrix(TILE, TILE)])


def solve_transposed(
    system: KernelTokens[jax.Array], beta_NxL: jax.Array, dnew_NxLxD: jax.Array, dseen_NxLxE: jax.Array
) -> list[jax.Array]:
    """Computes Xᵀ times the gradients of both solutions, in their shapes."""
    tokens = (system.k, system.logs), [beta_NxL], [dnew_NxLxD, dseen_NxLxE]
    return solve_systems('channel_delta_gradients', *tokens, _locate, _make_system, pair_turned, [matrix(TILE, TILE)])


def _locate(head: jax.Array, chunk: jax.Array) -> tuple:
    return head, slice_tile(chunk)


def _make_system(keys: list[tuple[Ref, list[Ref]]], scalars: list[Ref], faded_CxE: Ref) -> jax.Array:
    """Makes A, float32 in registers."""
    parts = [weigh_earlier(k, k, logs, faded_CxE, zeros(TILE, TILE)) for k, logs in keys]
    return sum(parts[1:], parts[0]) * repeat_per_row(load_rows(scalars[0]), TILE)


def differentiate_systems(
    system: KernelTokens[jax.Array], scaled: jax.Array, dsystem: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the gradients of keys and logs through A, whose rows are pairs of keys times β with keys.

    Args:
        system: keys and logs.
        scaled: keys times β, bfloat16 [N, L, E].
        dsystem: the gradients of each chunk's A, bfloat16 [N, L, C].

    Returns:
        The gradients that A gives to keys times β, and to keys, bfloat16, and to the logs, float32; [N, L, E].
    """
    n, length, key_size = system.k.shape

    def channel_delta_system_gradients(sources, dsystem, out, *, vectors, dpairs, ready, scratch, staging):
        head, rows, columns = lax.axis_index('head'), *(slice_tile(lax.axis_index(each)) for each in ('chunk', 'part'))
        for source, to in zip(jax.tree.leaves(sources), jax.tree.leaves(vectors), strict=True):
            plgpu.copy_gmem_to_smem(source.at[head, rows, columns], to, ready)
        plgpu.copy_gmem_to_smem(dsystem.at[head, rows], dpairs, ready)
        plgpu.barrier_wait(ready)
        nothing = zeros(TILE, TILE)
        scratch.dlog[...] = nothing
        x, k, logs = vectors
        found = differentiate_pairs(x, k, logs, dpairs, scratch, (nothing, nothing))
        plgpu.commit_smem()
        *places, dlog = (to.at[head, rows, columns] for to in out)
        plgpu.copy_smem_to_gmem(scratch.dlog, dlog)
        for value, to in zip(found, places, strict=True):
            wait_for_copies()
            release()
            send(value, staging, to)
        plgpu.wait_smem_to_gmem(0)

    tile, shape = matrix(TILE, TILE), system.k.shape
    (gradients,) = plgpu.kernel(
        channel_delta_system_gradients,
        out_type=(tuple(jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.bfloat16, jnp.bfloat16, jnp.float32)),),
        grid=(length // TILE, n, key_size // TILE),
        grid_names=('chunk', 'head', 'part'),
        compiler_params=FAST,
        scratch_types={
            'vectors': (tile, tile, [tile, tile]),
            'dpairs': tile,
            'ready': plgpu.Barrier(num_arrivals=5),
            'scratch': PairGradientMemory.allocate(),
            'staging': tile,
        },
    )((scaled, system.k, system.logs), dsystem)
    return gradients
