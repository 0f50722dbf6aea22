"""Factors by which the sums shrink from token to token, as running sums of their logarithms.

    S_i = a_i S_{i-1} + φ(k_i) v_iᵀ     key j weighs for query i      w_ij Π_{j < m ≤ i} a_m = w_ij exp(G_i - G_j)

G is summed from the last token whose factor is 0: a reset, which hides all tokens before it from all that follow. G is
a pair of float32 numbers. So the difference of two running sums is as precise as the sum of the logs between them, for
long sequences and strong decay too. No difference is taken across a reset, where the product is 0.
"""

from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

RESET = -104.0
"""Below it exp gives 0 in float32: such a factor, -inf among them, is a reset."""


IN_TILE = -128.0
"""The log of a factor of 0 in `in_tile`: exp of it is 0, and so small a number costs the sums little precision."""


class Decay(NamedTuple):
    """Running sums [B, K, S + 1]: entry j + 1 is after token j, entry 0 before the first. Gradients go through `total`
    alone."""

    total: jax.Array
    """G, float32."""
    rest: jax.Array
    """The rest that the rounding of G has left."""
    segment: jax.Array
    """The number of resets so far, int32."""


def cotangent(dtotal: jax.Array) -> Decay:
    """Returns the gradient of running sums, for the backward function of a `jax.custom_vjp`."""
    nothing = cast(jax.Array, None)  # what JAX takes for the gradient of an array that has none
    return Decay(dtotal, nothing, nothing)


def accumulate(log_decay_BxSxK: jax.Array) -> Decay:
    """Returns the running sums of log factors ≤ 0, differentiable; the gradient of a reset's own factor is 0."""
    return _accumulate(log_decay_BxSxK.astype(jnp.float32).swapaxes(1, 2))


@jax.custom_vjp
def _accumulate(log_decay_BxKxS):
    resets = log_decay_BxKxS < RESET
    total, rest = sum_in_pairs(jnp.where(resets, 0.0, log_decay_BxKxS), resets)
    before = ((0, 0), (0, 0), (1, 0))
    segment = jnp.cumsum(resets, axis=-1, dtype=jnp.int32)
    return Decay(*(jnp.pad(x, before) for x in (total, rest, segment)))


def backwards(dtotal_BxKxS: jax.Array, resets_BxKxS: jax.Array) -> jax.Array:
    """Returns the gradients of log factors from the gradients of their running sums after each token.

    A token's factor is part of all sums from it to the next reset.
    """
    ends = jnp.pad(resets_BxKxS[..., 1:], ((0, 0), (0, 0), (0, 1)))
    total, _ = sum_in_pairs(dtotal_BxKxS, ends, reverse=True)
    return jnp.where(resets_BxKxS, 0.0, total)


def backwards_in_tiles(dtotal_NxL: jax.Array, resets_NxL: jax.Array, tile: int) -> jax.Array:
    """Returns the same as `backwards` up to rounding, in few operations: a loop costs a GPU more than its sums.

    Each sum has two parts, over the rest of a tile and over later tiles. `tile` divides L.
    """
    n, length = dtotal_NxL.shape
    d, resets = (a.reshape(n, length // tile, tile) for a in (dtotal_NxL, resets_NxL))
    number, order = jnp.cumsum(resets, axis=-1, dtype=jnp.int32), jnp.arange(max(tile, length // tile))

    def sum_where(mask, values):
        return jnp.sum(jnp.where(mask, values[..., None, :], 0.0), axis=-1)

    later = order[:tile] >= order[:tile, None]
    inside = sum_where(later & (number[..., None, :] == number[..., None]), d)
    # A tile's tokens before its first reset continue the part with which the tile before it ends.
    first = jnp.sum(jnp.where(number == 0, d, 0.0), axis=-1)
    last = jnp.cumsum(number[..., -1], axis=-1)
    before = jnp.pad(last, ((0, 0), (1, 0)))[:, :-1]
    tiles = order[: length // tile]
    outside = sum_where((tiles > tiles[:, None]) & (before[:, None, :] == last[..., None]), first)
    total = inside + jnp.where(number == number[..., -1:], outside[..., None], 0.0)
    return jnp.where(resets, 0.0, total).reshape(n, length)


_accumulate.defvjp(lambda x: (_accumulate(x), x < RESET), lambda resets, d: (backwards(d.total[..., 1:], resets),))


def sum_in_pairs(x: jax.Array, starts: jax.Array, reverse: bool = False) -> tuple[jax.Array, jax.Array]:
    """Returns running sums along the last axis, begun anew where `starts`, as the nearest float32 and the rest.

    Each entry is joined with the one 1, 2, 4, … before it: whole arrays shifted, which compiles to one small loop
    (of `lax.associative_scan` a TPU makes hundreds of strided kernels).
    """
    length = x.shape[-1]

    def earlier(a, distance):
        """Returns the entries at this distance before each; 0 where there are none."""
        wide = jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, length) if reverse else (length, 0)])
        return lax.dynamic_slice_in_dim(wide, distance if reverse else length - distance, length, axis=-1)

    def join(step, sums):
        b_total, b_rest, b_starts = sums
        a_total, a_rest, a_starts = (earlier(a, jnp.int32(1) << step) for a in sums)
        total = a_total + b_total
        # The exact rounding error of this sum (Knuth 1997, §4.2.2, theorem B).
        part = total - a_total
        rest = (a_total - (total - part)) + (b_total - part) + (a_rest + b_rest)
        near = total + rest
        rest = rest - (near - total)
        return jnp.where(b_starts, b_total, near), jnp.where(b_starts, b_rest, rest), a_starts | b_starts

    steps = (length - 1).bit_length()
    return lax.fori_loop(0, steps, join, (x, jnp.zeros_like(x), starts))[:2]


def between(later: Decay, earlier: Decay) -> jax.Array:
    """Returns G_later - G_earlier: the log of the product of the factors between; -inf across a reset.

    The arguments broadcast. Where `later` is not the later one the result means nothing and may be above 0: mask it
    before it is exponentiated.
    """
    difference = (later.total - earlier.total) + (later.rest - earlier.rest)
    return jnp.where(later.segment == earlier.segment, difference, -jnp.inf)


def in_tile(log_decay: jax.Array) -> jax.Array:
    """Returns the sums of log factors from the start of the last axis to after each token.

    It is for axes so short that one float32 number does. No gradient goes to a reset's own factor.
    """
    return jnp.cumsum(jnp.where(log_decay < RESET, IN_TILE, log_decay), axis=-1)


def entries(decay: Decay, first: int, last: int | None = None) -> Decay:
    """Returns the entries `first` to before `last`."""
    return jax.tree.map(lambda x: x[..., first:last], decay)


def entry(decay: Decay, index: jax.Array | int) -> Decay:
    """Returns one entry, [B, K, 1]."""
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, index, 1, -1), decay)


def pairwise(log_decay_BxKxM: jax.Array) -> jax.Array:
    """Returns [B, K, M, M]: Σ_{j < m ≤ i} log_decay_m for query i and key j ≤ i, and 0 for the others, as it reads.

    Each pair has a sum of its own: the difference of two running sums would be inf - inf after a factor of 0.
    """
    m = jnp.arange(log_decay_BxKxM.shape[-1])
    return jnp.cumsum(jnp.where(m[:, None] > m, log_decay_BxKxM[..., None], 0.0), axis=2)


def constant(log_decay_K: jax.Array, batch: int, length: int) -> jax.Array:
    """Returns [B, L, K]: the same factor for every token of a head."""
    return jnp.broadcast_to(log_decay_K.astype(jnp.float32), (batch, length, log_decay_K.shape[0]))
