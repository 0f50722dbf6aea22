"""Rotation and layer normalization in plain XLA."""

import jax
import jax.numpy as jnp
from jax import lax

from lm.ops.rotary.types import EPSILON, HeadNorms, Rotation


def rotate(
    qk_BxLxNxC: jax.Array, rotation: Rotation | None, n_heads: int, norms: HeadNorms | None = None
) -> tuple[jax.Array, jax.Array]:
    """Arguments as in `lm.ops.rotary`."""
    x_BxLxNxC = qk_BxLxNxC if rotation is None else turn(qk_BxLxNxC, rotation)
    q_BxLxHxC, k_BxLxKxC = x_BxLxNxC[:, :, :n_heads], x_BxLxNxC[:, :, n_heads:]
    return (q_BxLxHxC, k_BxLxKxC) if norms is None else normalize(q_BxLxHxC, k_BxLxKxC, norms)


def unsupported(qk: jax.Array, rotation: Rotation | None, norms: HeadNorms | None) -> str | None:
    return None


def turn(x_BxLxNxC: jax.Array, rotation: Rotation) -> jax.Array:
    """x rotated, in its dtype."""
    cos, sin = rotation
    # Each half converted by itself: XLA would write the converted whole to memory.
    a, b = (half.astype(jnp.float32) for half in jnp.split(x_BxLxNxC, 2, axis=-1))
    return jnp.concatenate([x.astype(x_BxLxNxC.dtype) for x in (a * cos - b * sin, b * cos + a * sin)], axis=-1)


@jax.named_scope('qk_norms')
def normalize(q_BxLxHxC: jax.Array, k_BxLxKxC: jax.Array, norms: HeadNorms) -> tuple[jax.Array, jax.Array]:
    """Queries and keys, each normalized."""
    q = _normalized(q_BxLxHxC, norms.q_scale, norms.q_bias, norms.dtype)
    return q, _normalized(k_BxLxKxC, norms.k_scale, norms.k_bias, norms.dtype)


def _normalized(x_BxLxNxC, scale_C, bias_C, dtype):
    x32 = x_BxLxNxC.astype(jnp.float32)
    centred = x32 - x32.mean(-1, keepdims=True)
    rate = lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + EPSILON)
    return (centred * (rate * scale_C) + bias_C).astype(dtype or x_BxLxNxC.dtype)
