"""What the GPU kernels of linear attention are made of: matrices in shared memory, products, expanded features.

A thread block is one warpgroup of 128 threads and holds TILE tokens, the 64 rows of a `wgmma` product.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.linear_attention.gpu.plan import GROUP, SLICE, TILE, GpuPlan

WALKED = 3
"""Tiles of a block in shared memory: two to come, and one in use."""


def matrix(*shape: int) -> plgpu.SMEM:
    """bfloat16 matrices in shared memory, as `wgmma` wants them."""
    swizzle = plgpu.find_swizzle(16 * shape[-1])
    tiling = plgpu.TilingTransform((8, swizzle // 2))
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def spare(plan: GpuPlan) -> list[plgpu.SMEM]:
    """Scratch of `multiply`."""
    return [matrix(TILE, SLICE)] if plan.interpreted else []


def multiply(accumulator, a: jax.Array, b, spare) -> None:
    """accumulator += a · b with `a` [64, 64] in registers and `b` in shared memory, not awaited."""
    if spare:
        spare[0][...] = a
        plgpu.commit_smem()
        a = spare[0]
    plgpu.wgmma(accumulator, a, b)


def product(a, b) -> jax.Array:
    """a · b, both in shared memory, awaited; float32."""

    def compute(accumulator):
        plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(compute, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def release() -> None:
    """What this thread block has read of shared memory may be overwritten by copies from here on."""
    plgpu.commit_smem()


def write(value: jax.Array, destination, staging=None) -> None:
    """`value` to memory, as bfloat16 unless there is other `staging`."""

    def copy(smem):
        smem[...] = value.astype(smem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, destination)
        plgpu.wait_smem_to_gmem(0)

    pl.run_scoped(copy, staging or matrix(*value.shape))


def walk(sources, start, first, stop, use, carry=()):
    """carry = use(step, tiles, carry) for the tiles of a block in order, copied while those before are used.

    Args:
        sources: one head's arrays in memory, bfloat16 [L, C] or float32 [L].
        start: the first token of the block.
        first: the number of the first tile.
        stop: one more than that of the last.
        use: gets a tile of each source in shared memory.
        carry: what the first call gets.

    Returns:
        What the last call returned.
    """

    def scoped(*scratch):
        *buffers, arrived = scratch

        def fetch(step):
            slot, tokens = lax.rem(step, WALKED), pl.ds(start + step * TILE, TILE)
            for source, buffer in zip(sources, buffers, strict=True):
                plgpu.copy_gmem_to_smem(source.at[tokens], buffer.at[slot], arrived.at[slot])

        def step_of(step, carry):
            slot = lax.rem(step, WALKED)
            plgpu.wgmma_wait(0)

            @pl.when(step + WALKED - 1 < stop)
            def _():
                release()
                fetch(step + WALKED - 1)

            plgpu.barrier_wait(arrived.at[slot])
            return use(step, [buffer.at[slot] for buffer in buffers], carry)

        fetch(jnp.int32(first))
        pl.when(first + 1 < stop)(lambda: fetch(first + 1))
        result = lax.fori_loop(first, stop, step_of, carry)
        plgpu.wgmma_wait(0)
        release()
        return result

    shapes = [(WALKED, TILE, *source.shape[1:]) for source in sources]
    buffers = [matrix(*s) if len(s) == 3 else plgpu.SMEM(s, jnp.float32) for s in shapes]
    return pl.run_scoped(scoped, *buffers, plgpu.Barrier(num_arrivals=len(sources), num_barriers=WALKED))


def by_row(vector: jax.Array, columns: int) -> jax.Array:
    """One number a row."""
    return lax.broadcast_in_dim(vector, (vector.shape[0], columns), (0,))


def by_column(vector: jax.Array, rows: int) -> jax.Array:
    """One number a column."""
    return lax.broadcast_in_dim(vector, (rows, vector.shape[0]), (1,))


def load_matrix(ref) -> jax.Array:
    """In the registers' layout of a product."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False)


def load_rows(ref) -> jax.Array:
    """A number for each row of a product."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)


def load_columns(ref) -> jax.Array:
    """A number for each column of a product."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)


def zeros(*shape: int) -> jax.Array:
    """Float32, in the registers' layout of a product or of a number for each of its rows."""
    layout = plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)


def products(x_TxG: jax.Array, rows, index: int) -> jax.Array:
    """[TILE, SLICE]: four features, rows of `rows` from number 4 · index on, each times the 16 of a group.

    Each is a product of two bfloat16 numbers, rounded once.
    """
    count = SLICE // GROUP
    parts = [by_row(load_rows(rows.at[count * index + i]), GROUP) * x_TxG for i in range(count)]
    return jnp.concatenate(parts, axis=1)


def masked(weights: jax.Array, shift: jax.Array, keys: int) -> jax.Array:
    """Zero where a key comes after its query.

    Args:
        weights: [TILE, TILE].
        shift: how many tokens the first query is after the first key, not negative.
        keys: the axis of the keys, 0 or 1.
    """
    key, query = (
        plgpu.broadcasted_iota(jnp.int32, weights.shape, i, layout=plgpu.Layout.WGMMA) for i in (keys, 1 - keys)
    )
    return jnp.where(key <= query + shift, weights, 0.0)
