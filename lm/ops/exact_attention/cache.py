"""The keys and values that an exact mechanism has seen: its decoding state."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike


class Cache(NamedTuple):
    """The keys and values of the tokens so far.

    Without a window, keys [0, position) are filled. With one, the M last keys stand in the order of time, right
    aligned: before M tokens have come, the first M - position are empty.
    """

    k_BxMxKxD: jax.Array
    v_BxMxKxD: jax.Array
    position: jax.Array
    """Tokens seen so far, int32."""
    log_decay_BxMxK: jax.Array | None = None


Seen = dict[str, Any]
"""The arguments of the operation that say which keys and values the queries of a step see."""


def empty(
    batch: int,
    length: int,
    kv_heads: int,
    head_dim: int,
    dtype: DTypeLike,
    decays: bool = False,
    value_dim: int | None = None,
) -> Cache:
    """Returns a cache of `length` tokens: the longest sequence, or the window.

    `decays`: it holds log factors too. `value_dim`: the size of values; None: the size of keys, `head_dim`.
    """
    zeros = jnp.zeros((batch, length, kv_heads, head_dim), dtype)
    values = zeros if value_dim in (None, head_dim) else jnp.zeros((batch, length, kv_heads, value_dim), dtype)
    log_decay = jnp.zeros(zeros.shape[:3], jnp.float32) if decays else None
    return Cache(zeros, values, jnp.zeros((), jnp.int32), log_decay)


def append(
    cache: Cache, k_BxTxKxD: jax.Array, v_BxTxKxD: jax.Array, log_decay_BxTxK: jax.Array | None = None
) -> tuple[Cache, Seen]:
    """Writes T tokens after those seen. The caller ensures that they fit."""

    def write(old: jax.Array, new: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), cache.position, 1)

    k, v, log_decay = _join(write, cache, k_BxTxKxD, v_BxTxKxD, log_decay_BxTxK)
    position = cache.position + k_BxTxKxD.shape[1]
    seen = {'k_BxMxKxD': k, 'v_BxMxKxD': v, 'log_decay_BxMxK': log_decay}
    return Cache(k, v, position, log_decay), seen | {'q_offset': cache.position, 'k_start': 0}


def slide(
    cache: Cache, k_BxTxKxD: jax.Array, v_BxTxKxD: jax.Array, log_decay_BxTxK: jax.Array | None = None
) -> tuple[Cache, Seen]:
    """Appends T tokens and forgets the T oldest."""
    length = cache.k_BxMxKxD.shape[1]

    def join(old: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.concatenate([old, new.astype(old.dtype)], axis=1)

    k, v, log_decay = joined = _join(join, cache, k_BxTxKxD, v_BxTxKxD, log_decay_BxTxK)
    newest_k, newest_v, newest_decay = jax.tree.map(lambda x: x[:, -length:], joined)
    state = Cache(newest_k, newest_v, cache.position + k_BxTxKxD.shape[1], newest_decay)
    seen = {'k_BxMxKxD': k, 'v_BxMxKxD': v, 'log_decay_BxMxK': log_decay}
    return state, seen | {'q_offset': length, 'k_start': jnp.maximum(length - cache.position, 0)}


def _join(
    write: Callable[[jax.Array, jax.Array], jax.Array], cache: Cache, k_BxTxKxD, v_BxTxKxD, log_decay_BxTxK
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns write(old, new) of keys, values and log factors; None where the cache has no log factors."""
    log_decay = None
    if cache.log_decay_BxMxK is not None and log_decay_BxTxK is not None:
        log_decay = write(cache.log_decay_BxMxK, log_decay_BxTxK)
    return write(cache.k_BxMxKxD, k_BxTxKxD), write(cache.v_BxMxKxD, v_BxTxKxD), log_decay
