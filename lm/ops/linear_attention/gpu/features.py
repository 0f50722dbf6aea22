"""The arithmetic inside the GPU kernels of linear attention: expanded features, weights and masks.

A thread block is one warpgroup and holds TILE tokens.
"""

from typing import cast

import jax
import jax.numpy as jnp

from lm.ops.gpu import load_rows, number_entries, repeat_per_row
from lm.ops.linear_attention.gpu.plan import GROUP, SLICE, GpuPlan, Ref
from lm.ops.powers import power_and_slope


def multiply_features(x_TxG: jax.Array, rows: Ref, index: int) -> jax.Array:
    """Multiplies four features, rows of `rows` from number 4 · index on, with the 16 of a group: [TILE, SLICE].

    Each product multiplies two bfloat16 numbers and is rounded once.
    """
    count = SLICE // GROUP
    parts = [repeat_per_row(load_rows(rows.at[count * index + i]), GROUP) * x_TxG for i in range(count)]
    return jnp.concatenate(parts, axis=1)


def weigh(plan: GpuPlan, s: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes the weights inside a block of inner products s, and their slope / (degree scale)."""
    weights, slope = power_and_slope(s if plan.scale == 1.0 else plan.scale * s, plan.degree)
    return weights, cast(jax.Array, slope)  # no plan has degree 1


def mask(weights: jax.Array, shift: jax.Array | int, keys: int) -> jax.Array:
    """Sets weights to zero where a key comes after its query.

    Args:
        weights: [TILE, TILE].
        shift: the number of tokens from the first key to the first query, not negative.
        keys: the axis of the keys, 0 or 1.
    """
    numbers = number_entries()
    return jnp.where(numbers[keys] <= numbers[1 - keys] + shift, weights, 0.0)
