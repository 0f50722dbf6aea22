"""Building blocks of the Mosaic GPU kernels: matrices in shared memory, products, loads and stores, walks over tiles.

A warpgroup is 128 threads and holds a tile.
"""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from lm.ops import platform

TILE = 64
"""Tokens of a tile, the rows of a `wgmma` product."""

WALKED = 3
"""Tiles in shared memory: two to come, and one in use."""

FAST = plgpu.CompilerParams(approx_math=True)
"""Functions such as exp and tanh are instructions, whose error of 2⁻¹¹ rounding to bfloat16 exceeds."""


def matrix(*shape: int, dtype: DTypeLike = jnp.bfloat16) -> Any:
    """Returns memory for matrices in shared memory, as `wgmma` takes them."""
    size = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(8 * size * shape[-1])
    tiling = plgpu.TilingTransform((8, swizzle // size))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def accumulator(rows: int, columns: int) -> Any:
    """Returns registers for a float32 product."""
    return plgpu.ACC((rows, columns), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]: JAX documents it


def multiply(sums, a, b, warpgroups: str | None = None) -> None:
    """Adds a · b to `sums`, registers of `accumulator`, and does not wait for the product.

    `a` is in registers or in shared memory, `b` in the latter. The interpreter's `wgmma` takes no operand in registers,
    so it gets a copy; `warpgroups` is the axis of the warpgroups, where a thread block has several.
    """

    def copy(smem):
        place = smem if warpgroups is None else smem.at[lax.axis_index(warpgroups)]
        place[...] = a
        plgpu.commit_smem()
        plgpu.wgmma(sums, place, b)

    if isinstance(a, jax.Array) and platform.target_platform() != 'gpu':
        shape = a.shape if warpgroups is None else (lax.axis_size(warpgroups), *a.shape)
        pl.run_scoped(copy, matrix(*shape), collective_axes=warpgroups or ())
    else:
        plgpu.wgmma(sums, a, b)


def product(a, b) -> jax.Array:
    """Computes a · b, and waits for the product; float32. `multiply` says where the factors are."""
    return sum_products([(a, b)])[0]


def sum_products(*sums) -> list[jax.Array]:
    """Computes Σ a · b for each list of pairs (a, b), all at the same time; float32.

    `multiply` says where the factors are.
    """

    def compute(*accumulators):
        for registers, pairs in zip(accumulators, sums, strict=True):
            for a, b in pairs:
                multiply(registers, a, b)
        return [registers[...] for registers in accumulators]

    shapes = [(pairs[0][0].shape[0], pairs[0][1].shape[1]) for pairs in sums]
    return pl.run_scoped(compute, *(accumulator(*shape) for shape in shapes))


def release() -> None:
    """Lets copies overwrite, from here on, the shared memory that this warpgroup has read."""
    plgpu.commit_smem()


def repeat_per_row(vector: jax.Array, columns: int) -> jax.Array:
    """Repeats one number per row in all columns."""
    return lax.broadcast_in_dim(vector, (vector.shape[0], columns), (0,))


def repeat_per_column(vector: jax.Array, rows: int) -> jax.Array:
    """Repeats one number per column in all rows."""
    return lax.broadcast_in_dim(vector, (rows, vector.shape[0]), (1,))


def slice_tile(number: Any) -> Any:
    """Returns the rows or columns of a tile, or of a part of a key or a value."""
    return pl.ds(number * TILE, TILE)


def slice_head(array, number, heads: int, segments: int = 1, chunk: Any = 0, chunks: int = 1):
    """Returns 64 columns of one head over the tokens of one segment, a matrix in memory, [L / segments, 64].

    Copies reach it where it is, with a stride between tokens. So arrays keep the order in which layers have them.

    Args:
        array: a reference to [B, L, K · chunks · 64] in memory; each of the K heads serves the same number of heads.
        number: the number of the segment of a head, among B · heads · segments.
        heads: the number of heads that thread blocks compute.
        segments: the number of segments per sequence.
        chunk: the number of the 64 columns, counted from the head's first columns.
        chunks: the number of such columns per head.
    """
    head, segment = lax.div(number, segments), lax.rem(number, segments)
    batch, head = lax.div(head, heads), lax.rem(head, heads)
    length, group = array.shape[1] // segments, heads * chunks * TILE // array.shape[2]
    column = lax.div(head, group) * chunks + chunk
    return array.at[batch, pl.ds(segment * length, length), slice_tile(column)]


def load_matrix(ref) -> jax.Array:
    """Loads a matrix in the registers' layout of a product."""
    return _load(ref, plgpu.Layout.WGMMA)


def widen(x: Any) -> jax.Array:
    """Returns a matrix, in registers or in shared memory, as float32."""
    return (x if isinstance(x, jax.Array) else load_matrix(x)).astype(jnp.float32)


def number_entries() -> list[jax.Array]:
    """Returns the numbers of rows and of columns of a tile, in the registers' layout of a product."""
    layout = plgpu.Layout.WGMMA
    return [plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), axis, layout=layout) for axis in (0, 1)]


def load_rows(ref) -> jax.Array:
    """Loads a number for each row of a product."""
    return _load(ref, plgpu.Layout.WGMMA.reduce(1))


def load_columns(ref) -> jax.Array:
    """Loads a number for each column of a product."""
    return _load(ref, plgpu.Layout.WGMMA.reduce(0))


def _load(ref, layout: Any) -> jax.Array:
    load = cast(Any, plgpu.load)  # JAX before 0.11, which type checkers may see, takes an index here
    return load(ref, layout=layout, optimized=False)


def zeros(*shape: int) -> jax.Array:
    """Returns float32 zeros, in the registers' layout of a product or of a number for each of its rows."""
    layout = plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)


def zero_columns(size: int) -> jax.Array:
    """Returns float32 zeros, a number for each column of a product."""
    return plgpu.layout_cast(jnp.zeros((size,), jnp.float32), plgpu.Layout.WGMMA.reduce(0))


def send(value: jax.Array, staging, destination) -> None:
    """Sends `value` to memory through `staging`, which may be used again after `wait_for_copies()`."""
    staging[...] = value.astype(staging.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staging, destination)


def wait_for_copies() -> None:
    """Waits until the copies of `send` have read their staging memory."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def write(value: jax.Array, destination, staging=None) -> None:
    """Writes `value` to memory, as bfloat16 unless there is other `staging`."""

    def copy(smem):
        smem[...] = value.astype(smem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, destination)
        plgpu.wait_smem_to_gmem(0)

    pl.run_scoped(copy, staging or matrix(*value.shape))


def walk(sources, start, first, stop, use, carry=(), backwards=False, slots=WALKED):
    """Calls carry = use(number, tiles, carry) for tiles in order, which are copied while earlier ones are used.

    Args:
        sources: arrays in memory, bfloat16 [L, C] or float32 [L], in a NamedTuple or any other tree.
        start: the first token of tile 0.
        first: the number of the first tile.
        stop: one more than the number of the last tile.
        use: gets a tile of each source in shared memory, in the sources' tree.
        backwards: walk from the last tile to the first.
        slots: tiles for which there is room.

    Returns:
        The result of the last call.
    """

    arrays, tree = jax.tree.flatten(sources)

    def scoped(*scratch):
        *buffers, arrived = scratch

        def number(step):
            return stop - 1 - (step - first) if backwards else step

        def fetch(step):
            slot, tokens = lax.rem(step, slots), pl.ds(start + number(step) * TILE, TILE)
            for source, buffer in zip(arrays, buffers, strict=True):
                plgpu.copy_gmem_to_smem(source.at[tokens], buffer.at[slot], arrived.at[slot])

        def step_of(step, carry):
            slot = lax.rem(step, slots)
            plgpu.wgmma_wait(0)

            @pl.when(step + slots - 1 < stop)
            def _():
                release()
                fetch(step + slots - 1)

            plgpu.barrier_wait(arrived.at[slot])
            return use(number(step), tree.unflatten([buffer.at[slot] for buffer in buffers]), carry)

        fetch(jnp.int32(first))
        for ahead in range(1, slots - 1):
            pl.when(first + ahead < stop)(functools.partial(fetch, first + ahead))
        result = lax.fori_loop(first, stop, step_of, carry)
        plgpu.wgmma_wait(0)
        release()
        return result

    shapes = [(slots, TILE, *source.shape[1:]) for source in arrays]
    buffers = [matrix(*s) if len(s) == 3 else plgpu.SMEM(s, jnp.float32) for s in shapes]
    return pl.run_scoped(scoped, *buffers, plgpu.Barrier(num_arrivals=len(arrays), num_barriers=slots))
