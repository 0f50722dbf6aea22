"""What the GPU kernels of linear attention are made of: matrices in shared memory, products, expanded features.

A thread block is one warpgroup of 128 threads and holds TILE tokens, the 64 rows of a `wgmma` product.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.linear_attention.pallas_gpu_plan import GROUP, SLICE, TILE, Plan


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
