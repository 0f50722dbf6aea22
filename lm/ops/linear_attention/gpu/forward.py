"""The forward kernels of causal linear attention on Hopper GPUs.

N heads of all sequences, T tokens of a tile, R features x of queries and y of keys, C size of what the exact kernel
compares, D head size, S products in a square of x ⊗ x, M squares. Arrays in memory are [N, tokens, columns].
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.gpu import by_row, load_matrix, matrix, multiply, product, walk, write, zeros
from lm.ops.linear_attention.gpu import squares as pallas_gpu_squares
from lm.ops.linear_attention.gpu.features import masked, products, spare
from lm.ops.linear_attention.gpu.plan import GROUP, SLICE, SQUARE, TILE, GpuPlan, squares
from lm.ops.powers import power_and_slope

DEPTH = 4
"""Tiles of a block that `block_sums` holds at a time."""


def block_sums(plan: GpuPlan, x_NxLxR, xt_NxRxL, v_NxLxD) -> jax.Array:
    """Σ v (x ⊗ x)ᵀ over the tokens of each block: float32 [N, L / block, M, D, S], one thread block a square."""
    n, length, features = x_NxLxR.shape
    shape = (n, length // plan.block, len(squares(features)), TILE, SQUARE)
    slots = min(DEPTH, plan.tiles)

    def linear_attention_block_sums(x, xt, v, sums, x_smem, xt_smem, v_smem, phi_smem, ready):
        head, block, index = (lax.axis_index(name) for name in ('head', 'block', 'square'))
        row, column = _groups(index, features)

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
                    phi_smem[phi_slot, :, i * SLICE : (i + 1) * SLICE] = products(x_TxG, xt_smem.at[slot], i)
                plgpu.commit_smem()
                plgpu.wgmma(sum_DxS, v_smem.at[slot].transpose((1, 0)), phi_smem.at[phi_slot])
                # The product before this one is done, and what it read may be overwritten.
                plgpu.wgmma_wait(1)
                later = step + slots - 1

                @pl.when((later < plan.tiles) & (slots > 1))
                def _():
                    plgpu.commit_smem()
                    fetch(later, lax.rem(later, slots))

            return sum_DxS[...]

        sums[head, block, index] = pl.run_scoped(sum_up, plgpu.ACC((TILE, SQUARE), jnp.float32))

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


def _groups(index: jax.Array, features: int) -> tuple[jax.Array, jax.Array]:
    """The groups (row, column) of a square: `squares(features)[index]`."""
    row, column = index, jnp.int32(0)
    for size in range(1, features // GROUP):
        later = ((row >= size) & (column == size - 1)).astype(jnp.int32)
        row, column = row - size * later, column + later
    return row, column


def outputs(plan: GpuPlan, x, xt, a, b, v, moment=None, state=None) -> tuple[jax.Array, jax.Array]:
    """Outputs [N, L, D] and inverse denominators [N, L], one thread block a tile of queries.

    Args:
        plan: L is a multiple of its block.
        x: [N, L, R].
        xt: its transpose [N, R, L].
        a: [N, L, C], queries of the weights inside a block.
        b: [N, L, C], keys of them.
        v: [N, L, D].
        moment: [N, L / block, 3R, R]: Σ y yᵀ before each block, as three bfloat16 parts; unless plan.single_block.
        state: [N, L / block, 2M, S / 2, D]: Σ (y ⊗ y) vᵀ before each block, bfloat16; unless plan.single_block.
    """
    n, length, _ = a.shape

    def linear_attention_outputs(*refs):
        _outputs(plan, *refs)

    return plgpu.kernel(
        linear_attention_outputs,
        out_type=[jax.ShapeDtypeStruct(v.shape, v.dtype), jax.ShapeDtypeStruct((n, length), jnp.float32)],
        grid=(length // TILE, n),
        grid_names=('tile', 'head'),
        scratch_types=[spare(plan), matrix(TILE, a.shape[2]), plgpu.Barrier()],
    )(a, b, v, *(() if plan.single_block else (x, xt, moment, state)))


def _outputs(plan: GpuPlan, a, b, v, *refs):
    *far, o, inverse, register, a_smem, a_ready = refs
    # The last tiles first: in long blocks they have the most keys.
    tile, head = a.shape[1] // TILE - 1 - lax.axis_index('tile'), lax.axis_index('head')
    inside, block = lax.rem(tile, plan.tiles), lax.div(tile, plan.tiles)
    tokens = pl.ds(tile * TILE, TILE)
    plgpu.copy_gmem_to_smem(a.at[head, tokens], a_smem, a_ready)

    def compute(num_TxD):
        def before(*scratch):
            meeting = pallas_gpu_squares.Meeting(*far, (head, tokens, block), scratch, register)
            meeting.wait()
            x_TxR = load_matrix(meeting.x).astype(jnp.float32)
            den_T = jnp.maximum(jnp.sum(meeting.times_moment() * x_TxR, axis=1), 0.0)
            meeting.squares(num_TxD)
            return den_T

        def keys(step, tiles, den_T):
            b_smem, v_smem = tiles
            s_TxK = product(a_smem, b_smem.transpose((1, 0)))
            w_TxK, _ = power_and_slope(s_TxK if plan.scale == 1.0 else plan.scale * s_TxK, plan.degree)
            w_TxK = masked(w_TxK, (inside - step) * TILE, keys=1)
            multiply(num_TxD, w_TxK.astype(jnp.bfloat16), v_smem, register)
            return den_T + jnp.sum(w_TxK, axis=1)

        den_T = zeros(TILE) + plan.denominator_bias
        if not plan.single_block:
            den_T += pl.run_scoped(before, *pallas_gpu_squares.scratch(far[0].shape[2]))
        plgpu.barrier_wait(a_ready)
        den_T = walk((b.at[head], v.at[head]), block * plan.block, 0, inside + 1, keys, den_T)
        return num_TxD[...], den_T

    num_TxD, den_T = pl.run_scoped(compute, plgpu.ACC((TILE, TILE), jnp.float32))
    # Padding after the last token has no keys and, with denominator_bias 0, no denominator either.
    inverse_T = jnp.where(den_T == 0.0, 0.0, 1.0 / den_T)
    write(num_TxD * by_row(inverse_T, TILE), o.at[head, tokens])
    write(inverse_T, inverse.at[head, tokens], plgpu.SMEM((TILE,), jnp.float32))
