"""Vectors of a given length."""

import dataclasses

import jax
import jax.numpy as jnp

from lm.ops.delta_rule.types import DeltaCall

EPSILON = 1e-6
"""Added to the square of a length."""


def scale_to_length(x: jax.Array, length: float = 1.0) -> jax.Array:
    """Scales vectors along the last axis to this length."""
    wide = x.astype(jnp.float32)
    return (wide * length * jax.lax.rsqrt((wide**2).sum(-1, keepdims=True) + EPSILON)).astype(x.dtype)


def scale_vectors(call: DeltaCall) -> DeltaCall:
    """Scales queries to the call's `query_length` and keys to length 1; scales neither if it is None."""
    if call.query_length is None:
        return call
    q, k = scale_to_length(call.q_BxLxHxE, call.query_length), scale_to_length(call.k_BxLxKxE)
    return dataclasses.replace(call, q_BxLxHxE=q, k_BxLxKxE=k, query_length=None)
