"""Feature maps φ(x) = f(W x, x) inside the TPU kernels of linear attention.

They are computed in VMEM, and again in the backward pass.

W x decides how precise the features are: Performer takes exponentials of it, LLoPS its fourth power. One bfloat16 pass
of the matrix unit would cost both their accuracy. The parts of W, and of x where it has more than eight bits, lie side
by side in the contraction: for heads of 64 two parts fill its 128 rows and so cost no more than one.

E rows of x, R of W, M features, T tokens.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lm.ops.dots import in_parts
from lm.ops.linear_attention.feature_maps import ProductMap
from lm.ops.linear_attention.tpu.plan import KernelInputs, Ref, TpuPlan
from lm.ops.linear_attention.types import Sides
from lm.ops.tpu import dot


class MapFeatures(NamedTuple):
    """Features φ(x), and the function that turns their float32 gradient into gradients of x and of W.

    The gradient of W is None where the map does not learn.
    """

    phi_MxT: jax.Array
    pull: Callable[[jax.Array], tuple[jax.Array, jax.Array | None]] | None


Make = Callable[[ProductMap, jax.Array, jax.Array, bool, jnp.dtype], MapFeatures]
"""`make_features` or `make_with_gradient`."""


def make_operand(matrix_RxE: jax.Array, x_dtype: jnp.dtype, dtype: jnp.dtype) -> jax.Array:
    """Makes W as the kernels read it.

    For float32 features the operand is W itself; else its bfloat16 parts, as many as meet the parts of x, [R, n E].
    """
    if dtype == jnp.float32:
        return matrix_RxE
    high_RxE, low_RxE = in_parts(matrix_RxE, 2, in_kernel=False)
    parts = [high_RxE, low_RxE] + ([high_RxE] if x_dtype == jnp.float32 else [])
    return jnp.concatenate(parts, axis=1)


def make_operands(maps: Sides[jax.Array] | None, inputs: KernelInputs) -> Sides[jax.Array] | None:
    """Makes the matrices of a map as the kernels read them."""
    if maps is None:
        return None
    dtype = inputs.v_NxDxL.dtype
    queries = make_operand(maps.queries, inputs.x_NxFxL.dtype, dtype)
    return Sides(queries, make_operand(maps.keys, inputs.y_NxFxL.dtype, dtype))


def multiply(operand_RxC: jax.Array, x_ExT: jax.Array) -> jax.Array:
    """Computes W x in float32, to 16 bits or for a float32 operand to 24."""
    if operand_RxC.dtype == jnp.float32:
        return dot(operand_RxC, x_ExT.astype(jnp.float32), (1, 0))
    high_ExT, *low_ExT = in_parts(x_ExT, 2) if x_ExT.dtype == jnp.float32 else [x_ExT]
    return dot(operand_RxC, jnp.concatenate([high_ExT, high_ExT, *low_ExT], axis=0), (1, 0))


def make_features(
    feature_map: ProductMap, operand_RxC: jax.Array, x_ExT: jax.Array, queries: bool, dtype: jnp.dtype
) -> MapFeatures:
    """Computes features of queries or keys x."""
    wx_RxT = multiply(operand_RxC, x_ExT)
    return MapFeatures(feature_map.of_products(wx_RxT, x_ExT.astype(jnp.float32), queries).astype(dtype), None)


def make_with_gradient(
    feature_map: ProductMap, operand_RxC: jax.Array, x_ExT: jax.Array, queries: bool, dtype: jnp.dtype
) -> MapFeatures:
    """Computes features of queries or keys x, and the function for their gradient."""
    wide_ExT = x_ExT.astype(jnp.float32)
    wx_RxT = multiply(operand_RxC, x_ExT)
    phi_MxT, pull = jax.vjp(lambda wx, x: feature_map.of_products(wx, x, queries), wx_RxT, wide_ExT)

    def differentiate(dphi_MxT: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        dwx_RxT, dx_ExT = pull(dphi_MxT)
        dwx_RxT, size = dwx_RxT.astype(dtype), x_ExT.shape[0]
        if dtype == jnp.float32:
            dx_ExT += dot(operand_RxC, dwx_RxT, (0, 0))
        else:
            parts = dot(operand_RxC[:, : 2 * size], dwx_RxT, (0, 0))
            dx_ExT += parts[:size] + parts[size:]
        return dx_ExT, dot(dwx_RxT, x_ExT.astype(dtype), (1, 1)) if feature_map.learns else None

    return MapFeatures(phi_MxT.astype(dtype), differentiate)


def make_of_heads(
    make: Make, plan: TpuPlan, operands: Sides[Ref] | None, inputs: KernelInputs
) -> list[Sides[MapFeatures] | None]:
    """Makes the features of each head; None without a map.

    All features are written before anything reads one. Matrix units keep the order in which products are written, and
    so compute products of one head while features of another head are made.
    """
    if plan.feature_map is None or operands is None:
        return [None] * plan.heads
    dtype, made = inputs.v_NxDxL.dtype, []
    for operand, x, queries in ((operands.queries, inputs.x_NxFxL, True), (operands.keys, inputs.y_NxFxL, False)):
        made.append([make(plan.feature_map, operand[...], x[head], queries, dtype) for head in range(plan.heads)])
    return [Sides(*both) for both in zip(*made, strict=True)]
