"""Rotation, and normalizations before and after it, in plain XLA."""

import jax
import jax.numpy as jnp
from jax import lax

from lm.ops.formulas import EPSILON
from lm.ops.rotary.types import HeadNorms, RootNorms, RotaryCall, Rotation


def rotate(call: RotaryCall) -> tuple[jax.Array, jax.Array]:
    """Divides by the root mean square, rotates, then normalizes."""
    x_BxLxNxC = call.qk_BxLxNxC
    if call.roots is not None:
        x_BxLxNxC = _divide_by_root(x_BxLxNxC, call.roots, call.n_heads)
    if call.rotation is not None:
        x_BxLxNxC = turn(x_BxLxNxC, call.rotation)
    q_BxLxHxC, k_BxLxKxC = x_BxLxNxC[:, :, : call.n_heads], x_BxLxNxC[:, :, call.n_heads :]
    if call.norms is None:
        return q_BxLxHxC, k_BxLxKxC
    return normalize(q_BxLxHxC, k_BxLxKxC, call.norms)


def turn(x_BxLxNxC: jax.Array, rotation: Rotation) -> jax.Array:
    """Returns x rotated, in its dtype."""
    cos, sin = rotation
    # Each half converted by itself: XLA would write the converted whole to memory.
    a, b = (half.astype(jnp.float32) for half in jnp.split(x_BxLxNxC, 2, axis=-1))
    return jnp.concatenate([x.astype(x_BxLxNxC.dtype) for x in (a * cos - b * sin, b * cos + a * sin)], axis=-1)


@jax.named_scope('qk_norms')
def _divide_by_root(x_BxLxNxC: jax.Array, roots: RootNorms, n_heads: int) -> jax.Array:
    x32 = x_BxLxNxC.astype(jnp.float32)
    rate = lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + roots.epsilon)
    return (x32 * (rate * roots.spread(x_BxLxNxC.shape[2], n_heads))).astype(x_BxLxNxC.dtype)


@jax.named_scope('qk_norms')
def normalize(q_BxLxHxC: jax.Array, k_BxLxKxC: jax.Array, norms: HeadNorms) -> tuple[jax.Array, jax.Array]:
    """Returns queries and keys, each normalized."""
    q_BxLxHxC = _normalize(q_BxLxHxC, norms.q_scale_C, norms.q_bias_C, norms.dtype)
    return q_BxLxHxC, _normalize(k_BxLxKxC, norms.k_scale_C, norms.k_bias_C, norms.dtype)


def _normalize(x_BxLxNxC, scale_C, bias_C, dtype) -> jax.Array:
    x32 = x_BxLxNxC.astype(jnp.float32)
    centred = x32 - x32.mean(-1, keepdims=True)
    rate = lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + EPSILON)
    return (centred * (rate * scale_C) + bias_C).astype(dtype or x_BxLxNxC.dtype)
