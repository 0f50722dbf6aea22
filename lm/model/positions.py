"""Where a token stands: sinusoids added to embeddings, and rotations of queries and keys.

B batch, L length, N heads, C head size.
"""

import jax
import jax.numpy as jnp

Rotation = tuple[jax.Array, jax.Array]
"""Cosine and sine of the rotary angles."""


def sinusoids(positions: jax.Array, width: int) -> jax.Array:
    """Sinusoidal position embedding (Vaswani et al. 2017, §3.5), [L, width] of positions [L] and [B, L, width] of
    [B, L]: sines first, cosines second."""
    angle = _angles(positions, width)
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)


def rotary(positions: jax.Array, width: int, base: float = 10_000.0) -> Rotation:
    """Cosine and sine of the rotary angles (Su et al. 2021, eq. 15), each [L, 1, width/2] of positions [L] and
    [B, L, 1, width/2] of [B, L]."""
    angle = _angles(positions, width, base)[..., None, :]
    return jnp.cos(angle), jnp.sin(angle)


@jax.named_scope('rotary')
def rotate(x_BxLxNxC: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the pairs (c, c + C/2) of each head by its position's angles, in float32."""
    cos, sin = rotation
    # Each half converted by itself: XLA would write the converted whole to memory.
    a, b = (half.astype(jnp.float32) for half in jnp.split(x_BxLxNxC, 2, axis=-1))
    return jnp.concatenate([x.astype(x_BxLxNxC.dtype) for x in (a * cos - b * sin, b * cos + a * sin)], axis=-1)


def _angles(positions, width, base=10_000.0):
    frequencies = base ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    return positions.astype(jnp.float32)[..., None] * frequencies
