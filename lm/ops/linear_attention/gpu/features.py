"""What the GPU kernels of linear attention are made of: expanded features and masks.

A thread block is one warpgroup and holds TILE tokens.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.gpu import by_row, load_rows, matrix
from lm.ops.linear_attention.gpu.plan import GROUP, SLICE, TILE, GpuPlan


def spare(plan: GpuPlan) -> list[plgpu.SMEM]:
    """Scratch of `multiply`."""
    return [matrix(TILE, SLICE)] if plan.interpreted else []


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
