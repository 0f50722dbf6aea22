"""Choices between the numbers of registers. Masks of 32-bit numbers take two rows of bfloat16 at once."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from lm.ops.tpu import SUBLANES


def to_words(x: jax.Array) -> jax.Array:
    """Returns the 32-bit numbers that hold the rows of x."""
    return x if x.dtype.itemsize == 4 else pltpu.bitcast(x, jnp.int32)


def from_words(words: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Undoes `to_words`."""
    return words if words.dtype == dtype else pltpu.bitcast(words, dtype)


def keep(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns x where the mask is True, else 0. The mask has the lanes of x, and one row or the rows of its words."""
    words = to_words(x)
    return from_words(jnp.where(mask, words, jnp.zeros((), words.dtype)), x.dtype)


def choose(mask: jax.Array, x: jax.Array, other: jax.Array) -> jax.Array:
    """Returns x where the mask is True, else the other one of the same type."""
    return from_words(jnp.where(mask, to_words(x), to_words(other)), x.dtype)


def take_diagonal(x_CxC: jax.Array) -> jax.Array:
    """Returns the blocks of 8 on the diagonal side by side, [8, C]."""
    found = x_CxC[:SUBLANES]
    block = lax.broadcasted_iota(jnp.int32, (1, x_CxC.shape[1]), 1) // SUBLANES
    for at in range(1, len(x_CxC) // SUBLANES):
        found = jnp.where(block == at, x_CxC[SUBLANES * at : SUBLANES * (at + 1)], found)
    return found
