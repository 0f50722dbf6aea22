"""The keys and values that an exact mechanism has seen: its decoding state."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Cache(NamedTuple):
    """Without a window, keys [0, position) are filled. With one, the M last keys stand in the order of time, right
    aligned: before M tokens have come, the first M - position are empty."""

    k_BxMxKxD: jax.Array
    v_BxMxKxD: jax.Array
    position: jax.Array
    """Tokens seen so far, int32."""


class Visible(NamedTuple):
    """What the queries of a step see: keys, values, and the arguments `q_offset` and `k_start` of the operation."""

    k_BxMxKxD: jax.Array
    v_BxMxKxD: jax.Array
    q_offset: jax.Array | int
    k_start: jax.Array | int


def empty(batch: int, length: int, n_kv_heads: int, head_dim: int, dtype: Any) -> Cache:
    """A cache of `length` tokens: the longest sequence, or the window."""
    zeros = jnp.zeros((batch, length, n_kv_heads, head_dim), dtype)
    return Cache(zeros, zeros, jnp.zeros((), jnp.int32))


def append(cache: Cache, k_BxTxKxD: jax.Array, v_BxTxKxD: jax.Array) -> tuple[Cache, Visible]:
    """Writes T tokens after those seen. The caller sees to it that they fit."""
    written = [
        lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), cache.position, 1)
        for old, new in ((cache.k_BxMxKxD, k_BxTxKxD), (cache.v_BxMxKxD, v_BxTxKxD))
    ]
    return Cache(*written, cache.position + k_BxTxKxD.shape[1]), Visible(*written, cache.position, 0)


def slide(cache: Cache, k_BxTxKxD: jax.Array, v_BxTxKxD: jax.Array) -> tuple[Cache, Visible]:
    """Appends T tokens and forgets the T oldest."""
    length = cache.k_BxMxKxD.shape[1]
    joined = [
        jnp.concatenate([old, new.astype(old.dtype)], axis=1)
        for old, new in ((cache.k_BxMxKxD, k_BxTxKxD), (cache.v_BxMxKxD, v_BxTxKxD))
    ]
    kept = Cache(*(x[:, -length:] for x in joined), cache.position + k_BxTxKxD.shape[1])
    return kept, Visible(*joined, length, jnp.maximum(length - cache.position, 0))
