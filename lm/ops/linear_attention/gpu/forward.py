"""The forward kernels of causal linear attention on Hopper GPUs.

Letters: N heads of all sequences, T tokens of a tile, R features x of queries and y of keys. C is the size of the
vectors that the exact kernel compares, D the head size; a square of x ⊗ x has S products, and there are M squares.
Arrays in memory are [N, tokens, columns].
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.gpu import accumulator, load_matrix, matrix, multiply, product, repeat_per_row, walk, write, zeros
from lm.ops.linear_attention.gpu.features import mask, multiply_features, weigh
from lm.ops.linear_attention.gpu.plan import (
    GROUP,
    SLICE,
    SQUARE,
    TILE,
    FarTokens,
    GpuPlan,
    NearTokens,
    Ref,
    list_squares,
)
from lm.ops.linear_attention.gpu.squares import SumsReader, TilePlace, allocate_reader

DEPTH = 4
"""Tiles of a block that `sum_blocks` holds at a time."""


def sum_blocks(plan: GpuPlan, x_NxLxR: jax.Array, xt_NxRxL: jax.Array, v_NxLxD: jax.Array) -> jax.Array:
    """Computes Σ v (x ⊗ x)ᵀ over the tokens of each block: float32 [N, L / block, M, D, S].

    Each square has one thread block.
    """
    n, length, features = x_NxLxR.shape
    shape = (n, length // plan.block, len(list_squares(features)), TILE, SQUARE)
    slots = min(DEPTH, plan.tiles)

    def linear_attention_block_sums(x, xt, v, sums, x_smem, xt_smem, v_smem, phi_smem, ready):
        head, block, index = (lax.axis_index(name) for name in ('head', 'block', 'square'))
        row, column = _find_groups(index, features)

        def fetch(step, slot):
            tokens = pl.ds(block * plan.block + step * TILE, TILE)
            arrived = ready.at[slot]
            plgpu.copy_gmem_to_smem(x.at[head, tokens, pl.ds(column * GROUP, GROUP)], x_smem.at[slot], arrived)
            plgpu.copy_gmem_to_smem(xt.at[head, pl.ds(row * GROUP, GROUP), tokens], xt_smem.at[slot], arrived)
            plgpu.copy_gmem_to_smem(v.at[head, tokens], v_smem.at[slot], arrived)

        for step in range(max(slots - 1, 1)):
            fetch(step, step)

        def sum_up(sum_DxS):
            @pl.loop(0, plan.tiles)
            def _(step):
                slot, phi_slot = lax.rem(step, slots), lax.rem(step, 2)
                plgpu.barrier_wait(ready.at[slot])
                x_TxG = load_matrix(x_smem.at[slot])
                for i in range(SQUARE // SLICE):
                    phi_smem[phi_slot, :, i * SLICE : (i + 1) * SLICE] = multiply_features(x_TxG, xt_smem.at[slot], i)
                plgpu.commit_smem()
                plgpu.wgmma(sum_DxS, v_smem.at[slot].transpose((1, 0)), phi_smem.at[phi_slot])
                # The product before this one is done, and its operands may be overwritten.
                plgpu.wgmma_wait(1)
                later = step + slots - 1

                @pl.when((later < plan.tiles) & (slots > 1))
                def _():
                    plgpu.commit_smem()
                    fetch(later, lax.rem(later, slots))

            return sum_DxS[...]

        sums[head, block, index] = pl.run_scoped(sum_up, accumulator(TILE, SQUARE))

    return plgpu.kernel(
        linear_attention_block_sums,
        out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
        grid=(shape[2], shape[1], n),
        grid_names=('square', 'block', 'head'),
        scratch_types=[
            matrix(slots, TILE, GROUP),
            plgpu.SMEM((slots, GROUP, TILE), jnp.bfloat16),
            matrix(slots, TILE, TILE),
            matrix(2, TILE, SQUARE),
            plgpu.Barrier(num_arrivals=3, num_barriers=slots),
        ],
    )(x_NxLxR, xt_NxRxL, v_NxLxD)


def _find_groups(index: jax.Array, features: int) -> tuple[jax.Array, jax.Array]:
    """Finds the groups (row, column) of a square: `list_squares(features)[index]`."""
    row, column = index, jnp.int32(0)
    for size in range(1, features // GROUP):
        later = ((row >= size) & (column == size - 1)).astype(jnp.int32)
        row, column = row - size * later, column + later
    return row, column


def outputs(
    plan: GpuPlan, near: NearTokens[jax.Array], far: FarTokens[jax.Array] | None
) -> tuple[jax.Array, jax.Array]:
    """Computes outputs and inverse denominators, float32; one thread block per tile of queries.

    Args:
        plan: the plan; L is a multiple of its block.
        near: the operands of the weights inside a block, queries first.
        far: queries, and the sums before each block; None with plan.single_block.
    """
    n, length, size = near.own_NxLxC.shape
    v = near.v_NxLxD

    def linear_attention_outputs(*refs):
        _outputs(plan, *refs)

    o_NxLxD, inverse_NxL = plgpu.kernel(
        linear_attention_outputs,
        out_type=(jax.ShapeDtypeStruct(v.shape, v.dtype), jax.ShapeDtypeStruct((n, length), jnp.float32)),
        grid=(length // TILE, n),
        grid_names=('tile', 'head'),
        scratch_types=[matrix(TILE, size), plgpu.Barrier()],
    )(near, far)
    return o_NxLxD, inverse_NxL


def _outputs(
    plan: GpuPlan,
    near: NearTokens[Ref],
    far: FarTokens[Ref] | None,
    o: Ref,
    inverse: Ref,
    a_smem: Ref,
    a_ready: Ref,
) -> None:
    # The last tiles come first: in long blocks they have the most keys.
    place = TilePlace.find(near.own_NxLxC.shape[1] // TILE - 1 - lax.axis_index('tile'), plan.tiles)
    head, tokens = place.head, place.tokens
    plgpu.copy_gmem_to_smem(near.own_NxLxC.at[head, tokens], a_smem, a_ready)

    def compute(num_TxD):
        def read_sums(far, **memory):
            reader = SumsReader(far, place, **memory)
            reader.wait()
            x_TxR = load_matrix(reader.x_TxR).astype(jnp.float32)
            den_T = jnp.maximum(jnp.sum(reader.multiply_moment() * x_TxR, axis=1), 0.0)
            reader.multiply_squares(num_TxD)
            return den_T

        def read_keys(step, tiles, den_T):
            b_smem, v_smem = tiles
            w_TxK, _ = weigh(plan, product(a_smem, b_smem.transpose((1, 0))))
            w_TxK = mask(w_TxK, (place.inside - step) * TILE, keys=1)
            multiply(num_TxD, w_TxK.astype(jnp.bfloat16), v_smem)
            return den_T + jnp.sum(w_TxK, axis=1)

        den_T = zeros(TILE) + plan.denominator_bias
        if far is not None:
            den_T += pl.run_scoped(functools.partial(read_sums, far), **allocate_reader(far.x_NxLxR.shape[2]))
        plgpu.barrier_wait(a_ready)
        sources = (near.other_NxLxC.at[head], near.v_NxLxD.at[head])
        den_T = walk(sources, place.block * plan.block, 0, place.inside + 1, read_keys, den_T)
        return num_TxD[...], den_T

    num_TxD, den_T = pl.run_scoped(compute, accumulator(TILE, TILE))
    # Padding after the last token has no keys and, with denominator_bias 0, no denominator either.
    inverse_T = jnp.where(den_T == 0.0, 0.0, 1.0 / den_T)
    write(num_TxD * repeat_per_row(inverse_T, TILE), o.at[head, tokens])
    write(inverse_T, inverse.at[head, tokens], plgpu.SMEM((TILE,), jnp.float32))
