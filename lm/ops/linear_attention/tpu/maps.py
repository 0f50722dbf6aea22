"""Feature maps φ(x) = f(W x, x) inside the TPU kernels of linear attention: computed in VMEM, and again backward.

W x decides how precise the features are: Performer takes exponentials of it, LLoPS its fourth power. One bfloat16 pass
of the matrix unit would cost both their accuracy. The parts of W, and of x where it has more than eight bits, lie side
by side in the contraction: for heads of 64 two parts fill its 128 rows and so cost no more than one.

E rows of x, R of W, M features, T tokens.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from lm.ops.linear_attention.tpu.features import TpuPlan
from lm.ops.tpu import dot


def operand(matrix_RxE: jax.Array, x_dtype: jnp.dtype, dtype: jnp.dtype) -> jax.Array:
    """W as the kernels read it: itself for float32 features; else its bfloat16 parts, as many as meet x's, [R, n E]."""
    if dtype == jnp.float32:
        return matrix_RxE
    # Not a cast there and back, which XLA may leave out.
    high_RxE = lax.reduce_precision(matrix_RxE, exponent_bits=8, mantissa_bits=7)
    parts = [high_RxE, matrix_RxE - high_RxE] + ([high_RxE] if x_dtype == jnp.float32 else [])
    return jnp.concatenate(parts, axis=1).astype(dtype)


def products(operand_RxC: jax.Array, x_ExT: jax.Array) -> jax.Array:
    """W x in float32, to 16 bits or for a float32 operand to 24."""
    if operand_RxC.dtype == jnp.float32:
        return dot(operand_RxC, x_ExT.astype(jnp.float32), (1, 0))
    high_ExT = x_ExT.astype(operand_RxC.dtype)
    parts = [high_ExT, high_ExT]
    if x_ExT.dtype == jnp.float32:
        parts.append((x_ExT - high_ExT.astype(jnp.float32)).astype(high_ExT.dtype))
    return dot(operand_RxC, jnp.concatenate(parts, axis=0), (1, 0))


def features(plan: TpuPlan, operand_RxC: jax.Array, x_ExT: jax.Array, queries: bool, dtype: jnp.dtype) -> jax.Array:
    """φ(x) [M, T]."""
    return plan.feature_map.of_products(products(operand_RxC, x_ExT), x_ExT.astype(jnp.float32), queries).astype(dtype)


def of_heads(make: Callable, plan: TpuPlan, operands, x, y, dtype: jnp.dtype) -> list[tuple]:
    """(for queries, for keys) of each head, by `features` or `features_and_gradient`; () without a map.

    All of them before anything reads one: the matrix units keep the order in which products are written, and so have
    those of one head while features are made of another's.
    """
    if plan.feature_map is None:
        return [()] * plan.heads
    made = [
        [make(plan, operand[...], z[head], z is x, dtype) for head in range(plan.heads)]
        for operand, z in zip(operands, (x, y), strict=True)
    ]
    return list(zip(*made, strict=True))


def features_and_gradient(
    plan: TpuPlan, operand_RxC: jax.Array, x_ExT: jax.Array, queries: bool, dtype: jnp.dtype
) -> tuple[jax.Array, Callable[[jax.Array], tuple[jax.Array, jax.Array | None]]]:
    """φ(x), and what makes of its float32 gradient that of x and, where the map learns, that of W [R, E]."""
    wide_ExT = x_ExT.astype(jnp.float32)
    wx_RxT = products(operand_RxC, x_ExT)
    phi_MxT, pull = jax.vjp(lambda wx, x: plan.feature_map.of_products(wx, x, queries), wx_RxT, wide_ExT)

    def gradient(dphi_MxT):
        dwx_RxT, dx_ExT = pull(dphi_MxT)
        dwx_RxT, size = dwx_RxT.astype(dtype), x_ExT.shape[0]
        if dtype == jnp.float32:
            dx_ExT += dot(operand_RxC, dwx_RxT, (0, 0))
        else:
            parts = dot(operand_RxC[:, : 2 * size], dwx_RxT, (0, 0))
            dx_ExT += parts[:size] + parts[size:]
        return dx_ExT, dot(dwx_RxT, x_ExT.astype(dtype), (1, 1)) if plan.feature_map.learns else None

    return phi_MxT.astype(dtype), gradient
