"""What the GPU kernels of linear attention share: the plan, matrices in shared memory, expanded features.

A thread block is one warpgroup of 128 threads and holds TILE tokens, the 64 rows of a `wgmma` product. Features of
x ⊗ x are taken in squares of 16 × 16: of two mirror images only one is computed, and counts twice.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

TILE = 64
"""Tokens of a thread block, and size of heads: others are padded to it with zeros."""

GROUP = 16
"""Features on either side of a square: `wgmma` contracts 16 at a time."""

SQUARE = GROUP * GROUP
"""Products in a square, and columns of a widest product."""

SLICE = 64
"""Products that are multiplied at a time: four features with the 16 of a group."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the kernels compute.

    Attributes:
        block: tokens of a block, a multiple of TILE; inside it the weights are (scale ⟨a, b⟩)^degree, before it
            ⟨x, y⟩².
        exact_local: a and b are arrays of their own; else they are x and y.
        degree: of the weights inside a block, a power of two.
        scale: of the weights inside a block.
        bias: what the denominator starts from.
        alone: one block is all there is, so that x ⊗ x has no part in it.
        interpreted: the kernels run in the interpreter, whose `wgmma` takes no operand in registers.
    """

    block: int
    exact_local: bool
    degree: int
    scale: float
    bias: float
    alone: bool
    interpreted: bool

    @property
    def tiles(self) -> int:
        """Of a block."""
        return self.block // TILE


def squares(features: int) -> list[tuple[int, int]]:
    """The groups (row, column) of each square of products, none below the diagonal: 3 for 32 features, 10 for 64."""
    return [(row, column) for column in range(features // GROUP) for row in range(column + 1)]


def matrix(*shape: int) -> plgpu.SMEM:
    """bfloat16 matrices in shared memory, as `wgmma` wants them."""
    swizzle = plgpu.find_swizzle(16 * shape[-1])
    tiling = plgpu.TilingTransform((8, swizzle // 2))
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def spare(plan: Plan) -> list[plgpu.SMEM]:
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


def power_and_slope(s: jax.Array, degree: int) -> tuple[jax.Array, jax.Array | None]:
    """s ** degree for degree a power of two, and s ** (degree - 1), which is None where it is 1."""
    slope = None
    while degree > 1:
        slope = s if slope is None else slope * s
        s, degree = s * s, degree // 2
    return s, slope


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
