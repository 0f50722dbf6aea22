"""The rotation as the paper writes it, and layer normalization: readable, in the precision of the inputs."""

import jax
import jax.numpy as jnp

from lm.ops.rotary.types import EPSILON, HeadNorms, Rotation


def rotate(
    qk_BxLxNxC: jax.Array, rotation: Rotation | None, n_heads: int, norms: HeadNorms | None = None
) -> tuple[jax.Array, jax.Array]:
    """Arguments as in `lm.ops.rotary`."""
    x_BxLxNxC = qk_BxLxNxC if rotation is None else turn(qk_BxLxNxC, rotation)
    q_BxLxHxC, k_BxLxKxC = x_BxLxNxC[:, :, :n_heads], x_BxLxNxC[:, :, n_heads:]
    if norms is None:
        return q_BxLxHxC, k_BxLxKxC
    q_BxLxHxC = _normalized(q_BxLxHxC, norms.q_scale, norms.q_bias)
    k_BxLxKxC = _normalized(k_BxLxKxC, norms.k_scale, norms.k_bias)
    dtype = norms.dtype or qk_BxLxNxC.dtype
    return q_BxLxHxC.astype(dtype), k_BxLxKxC.astype(dtype)


def unsupported(qk: jax.Array, rotation: Rotation | None, norms: HeadNorms | None) -> str | None:
    return None


def turn(x_BxLxNxC: jax.Array, rotation: Rotation) -> jax.Array:
    """(x_c + i x_{c + C/2}) times (cos + i sin)."""
    cos, sin = rotation
    a, b = jnp.split(x_BxLxNxC, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _normalized(x_BxLxNxC, scale_C, bias_C):
    centred = x_BxLxNxC - x_BxLxNxC.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON) * scale_C + bias_C
