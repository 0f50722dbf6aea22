"""What the Mosaic GPU kernels of several operations share: matrices in shared memory, products, loads
and stores, walks over tiles of tokens.

A warpgroup is 128 threads and holds a tile.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

TILE = 64
"""Tokens of a tile, the rows of a `wgmma` product."""

WALKED = 3
"""Tiles in shared memory: two to come, and one in use."""


def matrix(*shape: int) -> plgpu.SMEM:
    """bfloat16 matrices in shared memory, as `wgmma` wants them."""
    swizzle = plgpu.find_swizzle(16 * shape[-1])
    tiling = plgpu.TilingTransform((8, swizzle // 2))
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def multiply(accumulator, a: jax.Array, b, spare) -> None:
    """accumulator += a · b with `a` [64, 64] in registers and `b` in shared memory, not awaited.

    `spare`: a list with a matrix for `a` where the kernel is interpreted, since the interpreter's `wgmma` takes no
    operand in registers; else an empty one.
    """
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
    """What this warpgroup has read of shared memory may be overwritten by copies from here on."""
    plgpu.commit_smem()


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


def write(value: jax.Array, destination, staging=None) -> None:
    """`value` to memory, as bfloat16 unless there is other `staging`."""

    def copy(smem):
        smem[...] = value.astype(smem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, destination)
        plgpu.wait_smem_to_gmem(0)

    pl.run_scoped(copy, staging or matrix(*value.shape))


def walk(sources, start, first, stop, use, carry=()):
    """carry = use(step, tiles, carry) for tiles in order, copied while those before are used.

    Args:
        sources: arrays in memory, bfloat16 [L, C] or float32 [L].
        start: the first token of tile 0.
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
