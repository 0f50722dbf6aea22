"""What kernels of the sketch networks are given for their weights.

Layer normalization's scale and bias become part of the map after it, gelu's constants of the maps around it: gelu(x) =
z (1 + tanh(z (LINEAR + z²))) / CUBIC with z = CUBIC x / 2, and what is left to do is `z (1 + tanh(z (LINEAR + z²)))`.
"""

import math

import jax
import jax.numpy as jnp

from lm.ops.sketch_networks.types import NetworkWeights

CUBIC = (4.0 * 0.044715 * 2.0 * math.sqrt(2.0 / math.pi)) ** (1 / 3)
LINEAR = 2.0 * math.sqrt(2.0 / math.pi) / CUBIC


def fold(first: NetworkWeights, second: NetworkWeights) -> tuple[jax.Array, ...]:
    """The four maps of both networks and the biases of the first and third, in float32.

    Returns:
        [N, 2, E, M], [N, 2, r, E], [N, 2, E, r], [N, 2, r, E]; [N, 2, E], [N, 2, E].
    """
    maps, biases = [], []
    for i in range(2):
        wide = [0.5 * CUBIC * network.kernels[2 * i] for network in (first, second)]
        scales, shifts = ([values[i] for values in pair] for pair in zip(first[1:], second[1:], strict=True))
        maps.append(jnp.stack([(k * s.swapaxes(1, 2)).swapaxes(1, 2) for k, s in zip(wide, scales, strict=True)], 1))
        biases.append(jnp.stack([jnp.sum(k * b.swapaxes(1, 2), 1) for k, b in zip(wide, shifts, strict=True)], 1))
        narrow = [network.kernels[2 * i + 1].swapaxes(1, 2) / CUBIC for network in (first, second)]
        maps.append(jnp.stack(narrow, 1))
    return (*maps, *biases)


def gelu(z: jax.Array) -> jax.Array:
    return z + z * jnp.tanh(z * (LINEAR + z * z))


def gelu_and_slope(z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`gelu` and its derivative."""
    inner = LINEAR + z * z
    slope = z * (3.0 * inner - 2.0 * LINEAR)
    p = 1.0 + jnp.tanh(z * inner)
    return z * p, p * (1.0 + (2.0 - p) * slope)
