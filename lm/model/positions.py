"""The positions of tokens: sinusoids added to embeddings, and the angles that rotate queries and keys.

B batch, L length.
"""

import jax
import jax.numpy as jnp

from lm.ops.rotary import Rotation


def sinusoids(positions: jax.Array, width: int) -> jax.Array:
    """Returns sinusoidal position embeddings (Vaswani et al. 2017, §3.5), sines first, cosines second.

    Positions [L] give [L, width]; positions [B, L] give [B, L, width].
    """
    angle = _angles(positions, width)
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)


def rotary(positions: jax.Array, width: int, base: float = 10_000.0, fraction: float = 1.0) -> Rotation:
    """Returns cosine and sine of the rotary angles (Su et al. 2021, eq. 15).

    Positions [L] give two arrays [L, 1, width/2]; positions [B, L] give [B, L, 1, width/2]. Only the first `fraction`
    of the pairs turns, with the angles of a head of that size; the angles of the others are 0.
    """
    pairs = width // 2
    turned = max(1, round(fraction * pairs))
    angle = _angles(positions, 2 * turned, base)[..., None, :]
    if turned < pairs:
        angle = jnp.pad(angle, [(0, 0)] * (angle.ndim - 1) + [(0, pairs - turned)])
    return Rotation(jnp.cos(angle), jnp.sin(angle))


def _angles(positions, width, base=10_000.0):
    frequencies = base ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    return positions.astype(jnp.float32)[..., None] * frequencies
