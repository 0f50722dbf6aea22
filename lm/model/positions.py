"""The positions of tokens: sinusoids added to embeddings, and the angles that rotate queries and keys.

B batch, L length.
"""

import jax
import jax.numpy as jnp

from lm.attention.rotary_scaling import RotaryScaling
from lm.ops.rotary import Rotation


def sinusoids(positions: jax.Array, width: int) -> jax.Array:
    """Returns sinusoidal position embeddings (Vaswani et al. 2017, §3.5), sines first, cosines second.

    Positions [L] give [L, width]; positions [B, L] give [B, L, width].
    """
    angle = _angles(positions, _frequencies(width))
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)


def rotary(
    positions: jax.Array,
    width: int,
    base: float = 10_000.0,
    fraction: float = 1.0,
    scaling: RotaryScaling | None = None,
) -> Rotation:
    """Returns cosine and sine of the rotary angles (Su et al. 2021, eq. 15).

    Positions [L] give two arrays [L, 1, width/2]; positions [B, L] give [B, L, 1, width/2]. Only the first `fraction`
    of the pairs turns, with the angles of a head of that size; the others stay as they are (cosine 1, sine 0).
    `scaling` changes the frequencies, and its amplitude multiplies the pairs that turn.
    """
    frequencies = rotary_frequencies(width, base, fraction, scaling)
    angle = _angles(positions, frequencies)[..., None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if scaling is not None and scaling.amplitude != 1:
        cos, sin = cos * scaling.amplitude, sin * scaling.amplitude
    if (still := width // 2 - len(frequencies)) > 0:
        padding = [(0, 0)] * (angle.ndim - 1) + [(0, still)]
        cos, sin = jnp.pad(cos, padding, constant_values=1), jnp.pad(sin, padding)
    return Rotation(cos, sin)


def rotary_frequencies(
    width: int, base: float = 10_000.0, fraction: float = 1.0, scaling: RotaryScaling | None = None
) -> jax.Array:
    """Returns the frequencies of the pairs that turn, at most [width/2], in radians per token."""
    frequencies = _frequencies(2 * max(1, round(fraction * (width // 2))), base)
    return frequencies if scaling is None else scaling.scale(frequencies, base)


def _frequencies(width, base=10_000.0):
    return base ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)


def _angles(positions, frequencies):
    return positions.astype(jnp.float32)[..., None] * frequencies
