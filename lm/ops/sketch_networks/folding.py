"""The weights that kernels of the sketch networks take.

Layer normalization's scale and bias become part of the map after it, gelu's constants of the maps around it: gelu(x) =
z (1 + tanh(z (LINEAR + z²))) / CUBIC with z = CUBIC x / 2, and what is left to do is `z (1 + tanh(z (LINEAR + z²)))`.
"""

import math
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from lm.ops.sketch_networks.types import ByLevel, Node

Each = TypeVar('Each')
CUBIC = (4.0 * 0.044715 * 2.0 * math.sqrt(2.0 / math.pi)) ** (1 / 3)
LINEAR = 2.0 * math.sqrt(2.0 / math.pi) / CUBIC


class LevelMaps(NamedTuple, Generic[Each]):
    """The two maps of one level of both networks of a node; for the upper level, M stands for r.

    `narrow` is [N, 2, r, E] on TPUs, and by hidden unit, [N, 2, E, r], on GPUs.
    """

    wide_Nx2xExM: Each
    narrow: Each


def fold(node: Node) -> tuple[ByLevel[LevelMaps[jax.Array]], ByLevel[jax.Array]]:
    """Returns the maps of both networks of a node, and the biases [N, 2, E] of the wide ones, in float32.

    The norms' scales and biases, and gelu's constants, are folded into them. `narrow` is [N, 2, r, E].
    """
    maps, biases = [], []
    for first, second in zip(*node, strict=True):
        pair = (first, second)
        wide = [0.5 * CUBIC * level.wide_NxMxE for level in pair]
        scaled = [(k * level.scale_Nx1xM.swapaxes(1, 2)).swapaxes(1, 2) for k, level in zip(wide, pair, strict=True)]
        wide_Nx2xExM = jnp.stack(scaled, 1)
        shifted = [jnp.sum(k * level.bias_Nx1xM.swapaxes(1, 2), 1) for k, level in zip(wide, pair, strict=True)]
        biases.append(jnp.stack(shifted, 1))
        narrow_Nx2xRxE = jnp.stack([level.narrow_NxExR.swapaxes(1, 2) / CUBIC for level in pair], 1)
        maps.append(LevelMaps(wide_Nx2xExM, narrow_Nx2xRxE))
    return ByLevel(*maps), ByLevel(*biases)


def gelu(z: jax.Array) -> jax.Array:
    return z + z * jnp.tanh(z * (LINEAR + z * z))


def gelu_and_slope(z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns `gelu` and its derivative."""
    inner = LINEAR + z * z
    slope = z * (3.0 * inner - 2.0 * LINEAR)
    p = 1.0 + jnp.tanh(z * inner)
    return z * p, p * (1.0 + (2.0 - p) * slope)
