"""Functions of vectors, some tokens of a long sequence at a time."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lm.ops import platform

CHUNK = 1024
"""Tokens at a time, where there are more."""

CPU_VECTORS = 1024
"""Vectors at a time on CPUs: hidden layers that stay in their caches are computed twice as fast, though once more."""


def map_together(
    function: Callable[[Any, jax.Array], jax.Array], parameters: object, xs_BxLxNxGxM: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """Computes function(parameters, x) of each array, side by side along G, some tokens at a time."""

    def mapped(parameters, x_BxLxNxGxM):
        return map_chunks(function, parameters, x_BxLxNxGxM, _chunk(x_BxLxNxGxM))

    if xs_BxLxNxGxM[0].shape[0] % platform.batch_shards() == 0:
        mapped = platform.per_device(mapped, split=(False, True))
    y_BxLxNxGxR = mapped(parameters, jnp.concatenate(xs_BxLxNxGxM, axis=3))
    starts = [0]
    for x_BxLxNxGxM in xs_BxLxNxGxM:
        starts.append(starts[-1] + x_BxLxNxGxM.shape[3])
    return tuple(y_BxLxNxGxR[:, :, :, low:high] for low, high in itertools.pairwise(starts))


def _chunk(x_BxLxNxGxM: jax.Array) -> int:
    """Returns how many tokens of each sequence are computed at a time."""
    if platform.target_platform() != 'cpu':
        return CHUNK
    batch, _, n, heads, _ = x_BxLxNxGxM.shape
    return min(CHUNK, max(8, CPU_VECTORS // (batch * n * heads)))


def map_chunks(
    function: Callable[[Any, jax.Array], jax.Array], parameters: object, x_BxLxNxGxM: jax.Array, chunk: int
) -> jax.Array:
    """Computes function(parameters, x), `chunk` tokens at a time if there are more.

    Each chunk is computed again in the backward pass: the hidden layers of a learned sketch are 32 r numbers per
    vector, many times the vector itself.
    """
    batch, length = x_BxLxNxGxM.shape[:2]
    if length <= chunk:
        return function(parameters, x_BxLxNxGxM)
    n_chunks = -(-length // chunk)
    padding = [(0, 0)] * x_BxLxNxGxM.ndim
    padding[1] = (0, n_chunks * chunk - length)
    x = jnp.pad(x_BxLxNxGxM, padding).reshape(batch, n_chunks, chunk, *x_BxLxNxGxM.shape[2:]).swapaxes(0, 1)
    once = jax.checkpoint(function, prevent_cse=False)
    y = jax.lax.map(lambda part: once(parameters, part), x).swapaxes(0, 1)
    return y.reshape(batch, n_chunks * chunk, *y.shape[3:])[:, :length]
