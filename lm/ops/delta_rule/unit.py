"""Vectors of a given length."""

import jax
import jax.numpy as jnp

EPSILON = 1e-6
"""Added to the square of a length."""


def of_length(x: jax.Array, length: float = 1.0) -> jax.Array:
    """x with vectors of this length along the last axis."""
    wide = x.astype(jnp.float32)
    return (wide * length * jax.lax.rsqrt((wide**2).sum(-1, keepdims=True) + EPSILON)).astype(x.dtype)


def lengths(q: jax.Array, k: jax.Array, query_length: float | None) -> tuple[jax.Array, jax.Array]:
    """Queries of this length and keys of length 1; None: both as they are."""
    return (q, k) if query_length is None else (of_length(q, query_length), of_length(k))
