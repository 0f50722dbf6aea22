"""Normalizations of tokens, as an argument of operations that begin with one.

D numbers per token; T stands for any number of axes.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Norm:
    """Layer normalization, or where `centred` is False the normalization by the root mean square, which has no bias.

    `epsilon` is added to the variance, or to the mean of the squares.
    """

    gain_D: jax.Array
    bias_D: jax.Array | None
    centred: bool = dataclasses.field(metadata={'static': True})
    epsilon: float = dataclasses.field(metadata={'static': True})


def normalize(x_TxD: jax.Array, norm: Norm) -> jax.Array:
    """Computes in float32 in the order of flax, whose results are the same to the bit."""
    wide_TxD = x_TxD.astype(jnp.float32)
    variance_Tx1 = jnp.mean(lax.square(wide_TxD), axis=-1, keepdims=True)
    y_TxD = x_TxD
    if norm.centred:
        mean_Tx1 = jnp.mean(wide_TxD, axis=-1, keepdims=True)
        variance_Tx1 = jnp.maximum(0.0, variance_Tx1 - lax.square(mean_Tx1))
        y_TxD = x_TxD - mean_Tx1
    y_TxD = y_TxD * (lax.rsqrt(variance_Tx1 + norm.epsilon) * norm.gain_D.astype(x_TxD.dtype))
    if norm.bias_D is not None:
        y_TxD = y_TxD + norm.bias_D.astype(x_TxD.dtype)
    return y_TxD.astype(x_TxD.dtype)
