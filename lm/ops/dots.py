"""Products of arrays with float32 accumulation, and float32 arrays as operands of bfloat16 products."""

import jax
import jax.numpy as jnp

from lm.ops import platform


def dot(formula: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """`jnp.einsum(formula, a, b)` in float32, whatever the dtype of the operands.

    XLA's CPU backend refuses some products of bfloat16 with a float32 result at run time, so there the operands are
    made float32 first: the result is the same, since products of two bfloat16 numbers are exact in float32.
    """
    if platform.target_platform() == 'cpu':
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.einsum(formula, a, b, preferred_element_type=jnp.float32)


def dense(x_BxLxNxGxM: jax.Array, kernel_NxMxR: jax.Array) -> jax.Array:
    """The map of each of N groups, [B, L, N, G, r] in float32; the kernel is rounded to the dtype of x."""
    kernel_NxMxR = kernel_NxMxR.astype(x_BxLxNxGxM.dtype)
    if kernel_NxMxR.shape[0] == 1 and platform.target_platform() == 'cpu':
        # One matrix product of two axes, which XLA's CPU backend runs several times faster, forward and backward. On
        # TPUs merging axes would be a copy: their tokens lie on the lanes.
        y_TxR = dot('tm,mr->tr', x_BxLxNxGxM.reshape(-1, kernel_NxMxR.shape[1]), kernel_NxMxR[0])
        return y_TxR.reshape(*x_BxLxNxGxM.shape[:-1], -1)
    if kernel_NxMxR.shape[0] == 1:
        return dot('blngm,mr->blngr', x_BxLxNxGxM, kernel_NxMxR[0])
    return dot('blngm,nmr->blngr', x_BxLxNxGxM, kernel_NxMxR)


def in_three(x: jax.Array) -> list[jax.Array]:
    """Three bfloat16 arrays whose sum is the float32 array x to 24 bits.

    A moment Σ y yᵀ rounded to bfloat16 makes denominators negative where keys are concentrated and the query is
    orthogonal to them.
    """
    parts = []
    for _ in range(3):
        parts.append(x.astype(jnp.bfloat16))
        x = x - parts[-1].astype(jnp.float32)
    return parts
