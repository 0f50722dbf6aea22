"""Products of arrays with float32 accumulation."""

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
