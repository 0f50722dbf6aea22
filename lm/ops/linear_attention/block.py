"""One block of linear attention: what its queries read and what its keys add to the sums.

Tokens are the last axis of all arrays. G query heads share each of the K key heads; T queries, S keys. With a window of
N the keys are shifted by N against the queries: entry j of the block's keys is key j - N. The approximate part is
then ordinary causal attention to them, the exact part sees entries i + 1 … i + N.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lm.ops import decay as decays
from lm.ops.decay import Decay
from lm.ops.dots import dot
from lm.ops.linear_attention import expansion
from lm.ops.linear_attention.types import Options, State, faded


class BlockQueries(NamedTuple):
    """Inputs of the feature map [B, K, E, G, T], and what the exact kernel compares [B, K, C, G, T]."""

    q: jax.Array | None
    q_local: jax.Array | None


class BlockKeys(NamedTuple):
    """Inputs of the feature map [B, K, E, S], values [B, K, D, S], what the exact kernel compares [B, K, C, S]."""

    k: jax.Array | None
    v: jax.Array | None
    k_local: jax.Array | None


class Bounds(NamedTuple):
    """Indices of keys, int32."""

    first: jax.Array
    """Keys before it do not exist."""
    last: jax.Array
    """Keys from it on are left out of the sums."""
    older: jax.Array
    """Queries from it on have an approximate part."""


class Sums(NamedTuple):
    """A `State` whose kv is in the pieces of the expansion, [B, K, Rᵢ, D]."""

    kv: tuple[jax.Array, ...]
    totals: tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a block has to do."""

    options: Options
    tile: int
    """Rows of queries at a time: work above the diagonal is skipped tile by tile."""
    reads: bool
    """Whether there are sums to read."""
    dtype: Any
    """Of the operands of the large products: the values'."""

    @property
    def lag(self) -> int:
        return self.options.window or 0

    @property
    def compares(self) -> bool:
        """Whether features are compared inside the block."""
        return self.options.causal and (self.options.local is None or self.options.window is not None)

    def features(self, parameters: Any, x: jax.Array) -> jax.Array:
        """[B, K, E, T] of keys or [B, K, E, G, T] of queries to [B, K, F, …, T]."""
        if self.options.feature_map is None:
            return x.astype(self.dtype)
        if x.ndim == 4:
            y_BxTxKxF = self.options.features(parameters, x.transpose(0, 3, 1, 2), False)
            return y_BxTxKxF.astype(self.dtype).transpose(0, 2, 3, 1)
        batch, heads, size, groups, count = x.shape
        x_BxTxHxE = x.transpose(0, 4, 1, 3, 2).reshape(batch, count, heads * groups, size)
        y_BxTxHxF = self.options.features(parameters, x_BxTxHxE, True).astype(self.dtype)
        return y_BxTxHxF.reshape(batch, count, heads, groups, -1).transpose(0, 2, 4, 3, 1)


def token_minor(x_BxSxKxF: jax.Array | None) -> jax.Array | None:
    """[B, K, F, S]."""
    return None if x_BxSxKxF is None else x_BxSxKxF.transpose(0, 2, 3, 1)


def grouped(x_BxTxHxF: jax.Array | None, heads: int) -> jax.Array | None:
    """[B, K, F, G, T]."""
    if x_BxTxHxF is None:
        return None
    batch, count, total, size = x_BxTxHxF.shape
    return x_BxTxHxF.reshape(batch, count, heads, total // heads, size).transpose(0, 2, 4, 3, 1)


def ungrouped(x_BxKxFxGxT: jax.Array) -> jax.Array:
    """[B, T, H, F]."""
    batch, heads, size, groups, count = x_BxKxFxGxT.shape
    return x_BxKxFxGxT.transpose(0, 4, 1, 3, 2).reshape(batch, count, heads * groups, size)


def numerators(
    shape: Shape,
    queries: BlockQueries,
    keys: BlockKeys,
    parameters: Any,
    sums: Sums | None,
    bounds: Bounds | None,
    start: Any,
    decay: Decay | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Σ_j w_ij v_j and denominator_bias + Σ_j w_ij for the queries of a block.

    [B, K, D, G, T] and [B, K, G, T] float32.

    Args:
        shape: what to do.
        queries: T tokens.
        keys: T tokens, with a window N + T.
        parameters: the feature map's, for queries and for keys.
        sums: over the keys before the block.
        bounds: of the indices of keys; None: none.
        start: index of the block's first key.
        decay: running sums of the keys' log factors; the sums over earlier keys are as of its entry 0. None: no decay.
    """
    x = shape.features(parameters[0], queries.q) if shape.reads or shape.compares else None
    y = None
    if shape.compares:
        count = x.shape[-1]
        y = shape.features(parameters[1], keys.k[..., :count])
    if shape.reads:
        sums = _weighted(shape, sums, x.shape[2])
    count, tiles = (x if queries.q_local is None else queries.q_local).shape[-1], []
    tops = range(0, count, shape.tile)
    # Split, not sliced: the gradient is then their concatenation, not a sum of padded ones.
    sizes = [min(shape.tile, count - top) for top in tops]
    xs, qs = ([None] * len(tops) if a is None else lax.split(a, sizes, a.ndim - 1) for a in (x, queries.q_local))
    for top, size, x_rows, q_rows in zip(tops, sizes, xs, qs, strict=True):
        rows = slice(top, top + size)
        row_T = jnp.arange(rows.start, rows.stop)
        fade = None
        if decay is not None:
            first, last = rows.start + 1, rows.stop + 1
            newest = decays.entries(decay, first, last) if shape.lag else decays.entries(decay, 0, 1)
            fade = _Fade(decay, decays.entries(decay, first + shape.lag, last + shape.lag), newest)
        tiles.append(_tile(shape, rows, row_T, x_rows, y, q_rows, keys.k_local, keys.v, sums, bounds, start, fade))
    return tuple(parts[0] if len(tiles) == 1 else jnp.concatenate(parts, -1) for parts in zip(*tiles, strict=True))


def one_row(
    shape: Shape,
    queries: BlockQueries,
    keys: BlockKeys,
    parameters: Any,
    sums: Sums,
    bounds: Bounds,
    at: jax.Array,
    decay: Decay | None = None,
) -> tuple[jax.Array, jax.Array]:
    """As `numerators` for the query of token `at` of a block, of whose keys those up to `at` have been filled in."""
    x = shape.features(parameters[0], queries.q)
    rows = slice(keys.v.shape[-1] - 1, keys.v.shape[-1])
    sums = _weighted(shape, sums, x.shape[2])
    fade = None if decay is None else _Fade(decay, decays.entry(decay, at + 1), decays.entries(decay, 0, 1))
    return _tile(shape, rows, at[None], x, None, queries.q_local, keys.k_local, keys.v, sums, bounds, 0, fade)


def _weighted(shape: Shape, sums: Sums, features: int) -> Sums:
    """The sums with coefficients and counts multiplied in, as operands."""
    weights = expansion.weights(shape.options.powers, features)
    return Sums(
        tuple((kv * w[:, None]).astype(shape.dtype) for kv, w in zip(sums.kv, weights, strict=True)), sums.totals
    )


class _Fade(NamedTuple):
    """The decay of some rows."""

    keys: Decay
    """Of the block's keys, with the entry before."""
    own: Decay
    """After the rows' own tokens, [B, K, T]."""
    newest: Decay
    """After the newest key out of the exact kernel's reach, [B, K, T] or [B, K, 1]."""

    def of_keys(self, first: int, last: int, visible: jax.Array) -> jax.Array:
        """Log factors of keys `first` to before `last`, [B, K, S, 1, T]; -inf where they are not visible."""
        later = jax.tree.map(lambda a: a[:, :, None, None], self.own)
        earlier = jax.tree.map(lambda a: a[:, :, first + 1 : last + 1, None, None], self.keys)
        return jnp.where(visible, decays.between(later, earlier), -jnp.inf)

    def of_sums(self) -> jax.Array:
        """Factors of the sums over the keys before the block, [B, K, 1, T]."""
        return jnp.exp(decays.between(self.own, decays.entries(self.keys, 0, 1)))[:, :, None]

    def older(self) -> jax.Array:
        """Whether no reset hides the keys out of the exact kernel's reach, [B, K, 1, T]."""
        return (self.own.segment == self.newest.segment)[:, :, None]


def _tile(shape, rows, row_T, x, y, q, k, v, sums, bounds, start, fade):
    """As `numerators`, for some rows of the block; x and q hold those alone. `row_T`: their indices in the block."""
    options, parts, shrink = shape.options, [], None
    if options.local is not None:
        first, last = (rows.start + 1, rows.stop + shape.lag) if shape.lag else (0, rows.stop)
        s_BxKxSxGxT = dot('bkcs,bkcgt->bksgt', k[..., first:last], q)
        j = jnp.arange(first, last)[:, None, None]
        visible = ((j > row_T) & (j <= row_T + shape.lag)) if shape.lag else j <= row_T
        if bounds is not None:
            visible &= start + j >= bounds.first
        log_factors = None if fade is None else fade.of_keys(first, last, visible)
        if options.local.stable:
            s_BxKxSxGxT = jnp.where(visible, s_BxKxSxGxT * options.local.scale, -jnp.inf)
            s_BxKxSxGxT = s_BxKxSxGxT if fade is None else s_BxKxSxGxT + log_factors
            m_BxKxGxT = lax.stop_gradient(s_BxKxSxGxT.max(2))
            # Bias and approximate part are multiplied by exp(-m), which must not overflow; where there is neither,
            # only the largest exponent itself keeps its weight from underflow.
            has_older_T = start + row_T >= bounds.older if not options.denominator_bias else jnp.ones_like(row_T, bool)
            if fade is not None and not options.denominator_bias:
                has_older_T = has_older_T & fade.older()
            m_BxKxGxT = jnp.maximum(m_BxKxGxT, jnp.where(has_older_T, 0.0, -jnp.inf))
            shrink = jnp.where(has_older_T, jnp.exp(-jnp.maximum(m_BxKxGxT, 0.0)), 0.0)
            exact_BxKxSxGxT = jnp.exp(s_BxKxSxGxT - m_BxKxGxT[:, :, None])
        else:
            exact_BxKxSxGxT = jnp.where(visible, options.local.weights(s_BxKxSxGxT), 0.0)
            exact_BxKxSxGxT = exact_BxKxSxGxT if fade is None else exact_BxKxSxGxT * jnp.exp(log_factors)
        parts.append((exact_BxKxSxGxT, v[..., first:last]))
    if y is not None:
        s_BxKxSxGxT = dot('bkfs,bkfgt->bksgt', y[..., : rows.stop], x)
        j = jnp.arange(rows.stop)[:, None, None]
        visible = j <= row_T if bounds is None else (j <= row_T) & (start + j >= bounds.first)
        w_BxKxSxGxT = jnp.where(visible, options.approximate(s_BxKxSxGxT), 0.0)
        if fade is not None:
            w_BxKxSxGxT *= jnp.exp(fade.of_keys(0, rows.stop, visible))
        parts.append((w_BxKxSxGxT if shrink is None else w_BxKxSxGxT * shrink[:, :, None], v[..., : rows.stop]))
    num_BxKxDxGxT = jnp.float32(0.0)
    den_BxKxGxT = jnp.full(v.shape[:2] + (q if x is None else x).shape[3:], options.denominator_bias, jnp.float32)
    den_BxKxGxT = den_BxKxGxT if shrink is None else den_BxKxGxT * shrink
    for w_BxKxSxGxT, values in parts:
        num_BxKxDxGxT += dot('bkds,bksgt->bkdgt', values, w_BxKxSxGxT.astype(v.dtype))
        den_BxKxGxT += w_BxKxSxGxT.sum(2)
    if shape.reads:
        phis, x = expansion.expand(options.powers, x)
        read_BxKxDxGxT = sum(dot('bkrd,bkrgt->bkdgt', kv, phi) for kv, phi in zip(sums.kv, phis, strict=True))
        total_BxKxGxT = expansion.read_totals(options.powers, x, sums.totals)
        if fade is not None:
            read_BxKxDxGxT *= fade.of_sums()[:, :, None]
            total_BxKxGxT *= fade.of_sums()
        num_BxKxDxGxT += read_BxKxDxGxT if shrink is None else read_BxKxDxGxT * shrink[:, :, None]
        den_BxKxGxT += total_BxKxGxT if shrink is None else total_BxKxGxT * shrink
    return num_BxKxDxGxT, den_BxKxGxT


def fold(
    shape: Shape,
    keys: BlockKeys,
    parameters: Any,
    bounds: Bounds | None,
    start: Any,
    fade_BxKxS: jax.Array | None = None,
) -> Sums:
    """The sums over these keys, of index `start` and on, except those outside of the bounds.

    `fade_BxKxS`: the logs of the keys' factors at the moment for which the sums are; None: 1.
    """
    y, one, factors = shape.features(parameters, keys.k), None, None
    if bounds is not None:
        index = start + jnp.arange(y.shape[-1])
        one = (index >= bounds.first) & (index < bounds.last)
        fade_BxKxS = None if fade_BxKxS is None else jnp.where(one, fade_BxKxS, -jnp.inf)
        y, one = jnp.where(one, y, 0), one.astype(jnp.float32)
    phis, y = expansion.expand(shape.options.powers, y, one)
    v = keys.v.astype(shape.dtype)
    if fade_BxKxS is not None:
        factors = jnp.exp(fade_BxKxS)
        v = (keys.v.astype(jnp.float32) * factors[:, :, None]).astype(shape.dtype)
    kv = tuple(dot('bkrt,bkdt->bkrd', phi, v) for phi in phis)
    return Sums(kv, expansion.totals(shape.options.powers, y, one, factors))


def last_entry(decay: Decay, bounds: Bounds | None, start: Any) -> Decay:
    """The entry after a block, or after the last of its keys that belongs to the sums."""
    size = decay.total.shape[-1] - 1
    return decays.entry(decay, size if bounds is None else jnp.clip(bounds.last - start, 0, size))


def advance(
    shape: Shape, sums: Sums, keys: BlockKeys, parameters: Any, bounds: Bounds | None, start: Any, decay: Decay | None
) -> Sums:
    """The sums after a block: those before it, faded, and its keys. As of the `last_entry` of the decay."""
    fade_BxKxS = None
    if decay is not None:
        last = last_entry(decay, bounds, start)
        sums = faded(sums, decays.between(last, decays.entries(decay, 0, 1))[..., 0])
        fade_BxKxS = decays.between(last, decays.entries(decay, 1))
    return jax.tree.map(jnp.add, sums, fold(shape, keys, parameters, bounds, start, fade_BxKxS))


def split(options: Options, state: State, features: int) -> Sums:
    """The state's kv cut in pieces."""
    pieces, at = [], 0
    for w in expansion.weights(options.powers, features):
        pieces.append(state.kv_BxKxRxD[:, :, at : at + len(w)])
        at += len(w)
    return Sums(tuple(pieces), state.totals)


def join(sums: Sums) -> State:
    """The inverse of `split`."""
    return State(jnp.concatenate(sums.kv, axis=2), sums.totals)


def no_keys(options: Options, batch: int, heads: int, features: int, values: int) -> Sums:
    """The sums over no keys, for F = features and D = values."""
    sizes = [len(w) for w in expansion.weights(options.powers, features)]
    kv = tuple(jnp.zeros((batch, heads, size, values), jnp.float32) for size in sizes)
    return Sums(kv, expansion.empty_totals(options.powers, batch, heads, features))
