"""Where a token stands: sinusoids added to embeddings, and the angles by which queries and keys are rotated.

B batch, L length.
"""

import jax
import jax.numpy as jnp

from lm.ops.rotary import Rotation


def sinusoids(positions: jax.Array, width: int) -> jax.Array:
    """Sinusoidal position embedding (Vaswani et al. 2017, §3.5), [L, width] of positions [L] and [B, L, width] of
    [B, L]: sines first, cosines second."""
    angle = _angles(positions, width)
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)


def rotary(positions: jax.Array, width: int, base: float = 10_000.0) -> Rotation:
    """Cosine and sine of the rotary angles (Su et al. 2021, eq. 15), each [L, 1, width/2] of positions [L] and
    [B, L, 1, width/2] of [B, L]."""
    angle = _angles(positions, width, base)[..., None, :]
    return Rotation(jnp.cos(angle), jnp.sin(angle))


def _angles(positions, width, base=10_000.0):
    frequencies = base ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    return positions.astype(jnp.float32)[..., None] * frequencies
