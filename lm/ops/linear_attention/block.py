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

from lm.ops.dots import dot
from lm.ops.linear_attention import expansion
from lm.ops.linear_attention.types import Options, State


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
    """
    x = shape.features(parameters[0], queries.q) if shape.reads or shape.compares else None
    y = None
    if shape.compares:
        count = x.shape[-1]
        y = shape.features(parameters[1], keys.k[..., :count])
    if shape.reads:
        sums = _weighted(shape, sums, x.shape[2])
    count, tiles = (x if queries.q_local is None else queries.q_local).shape[-1], []
    for top in range(0, count, shape.tile):
        rows = slice(top, min(top + shape.tile, count))
        x_rows, q_rows = (None if a is None else a[..., rows] for a in (x, queries.q_local))
        row_T = jnp.arange(rows.start, rows.stop)
        tiles.append(_tile(shape, rows, row_T, x_rows, y, q_rows, keys.k_local, keys.v, sums, bounds, start))
    return tuple(parts[0] if len(tiles) == 1 else jnp.concatenate(parts, -1) for parts in zip(*tiles, strict=True))


def one_row(
    shape: Shape, queries: BlockQueries, keys: BlockKeys, parameters: Any, sums: Sums, bounds: Bounds, at: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """As `numerators` for the query of token `at` of a block, of whose keys those up to `at` have been filled in."""
    x = shape.features(parameters[0], queries.q)
    rows = slice(keys.v.shape[-1] - 1, keys.v.shape[-1])
    sums = _weighted(shape, sums, x.shape[2])
    return _tile(shape, rows, at[None], x, None, queries.q_local, keys.k_local, keys.v, sums, bounds, 0)


def _weighted(shape: Shape, sums: Sums, features: int) -> Sums:
    """The sums with coefficients and counts multiplied in, as operands."""
    weights = expansion.weights(shape.options.powers, features)
    return Sums(
        tuple((kv * w[:, None]).astype(shape.dtype) for kv, w in zip(sums.kv, weights, strict=True)), sums.totals
    )


def _tile(shape, rows, row_T, x, y, q, k, v, sums, bounds, start):
    """As `numerators`, for some rows of the block; x and q hold those alone. `row_T`: their indices in the block."""
    options, parts, shrink = shape.options, [], None
    if options.local is not None:
        first, last = (rows.start + 1, rows.stop + shape.lag) if shape.lag else (0, rows.stop)
        s_BxKxSxGxT = dot('bkcs,bkcgt->bksgt', k[..., first:last], q)
        j = jnp.arange(first, last)[:, None, None]
        visible = ((j > row_T) & (j <= row_T + shape.lag)) if shape.lag else j <= row_T
        if bounds is not None:
            visible &= start + j >= bounds.first
        if options.local.stable:
            s_BxKxSxGxT = jnp.where(visible, s_BxKxSxGxT * options.local.scale, -jnp.inf)
            m_BxKxGxT = lax.stop_gradient(s_BxKxSxGxT.max(2))
            # Bias and approximate part are multiplied by exp(-m), which must not overflow; where there is neither,
            # only the largest exponent itself keeps its weight from underflow.
            has_older_T = start + row_T >= bounds.older if not options.denominator_bias else jnp.ones_like(row_T, bool)
            m_BxKxGxT = jnp.maximum(m_BxKxGxT, jnp.where(has_older_T, 0.0, -jnp.inf))
            shrink = jnp.where(has_older_T, jnp.exp(-jnp.maximum(m_BxKxGxT, 0.0)), 0.0)
            exact_BxKxSxGxT = jnp.exp(s_BxKxSxGxT - m_BxKxGxT[:, :, None])
        else:
            exact_BxKxSxGxT = jnp.where(visible, options.local.weights(s_BxKxSxGxT), 0.0)
        parts.append((exact_BxKxSxGxT, v[..., first:last]))
    if y is not None:
        s_BxKxSxGxT = dot('bkfs,bkfgt->bksgt', y[..., : rows.stop], x)
        j = jnp.arange(rows.stop)[:, None, None]
        visible = j <= row_T if bounds is None else (j <= row_T) & (start + j >= bounds.first)
        w_BxKxSxGxT = jnp.where(visible, options.approximate(s_BxKxSxGxT), 0.0)
        parts.append((w_BxKxSxGxT if shrink is None else w_BxKxSxGxT * shrink[:, :, None], v[..., : rows.stop]))
    num_BxKxDxGxT = jnp.float32(0.0)
    den_BxKxGxT = jnp.full(v.shape[:2] + (q if x is None else x).shape[3:], options.denominator_bias, jnp.float32)
    den_BxKxGxT = den_BxKxGxT if shrink is None else den_BxKxGxT * shrink
    for w_BxKxSxGxT, values in parts:
        num_BxKxDxGxT += dot('bkds,bksgt->bkdgt', values, w_BxKxSxGxT.astype(v.dtype))
        den_BxKxGxT += w_BxKxSxGxT.sum(2)
    if shape.reads:
        read_BxKxDxGxT = sum(
            dot('bkrd,bkrgt->bkdgt', kv, phi)
            for kv, phi in zip(sums.kv, expansion.expand(options.powers, x), strict=True)
        )
        total_BxKxGxT = expansion.read_totals(options.powers, x, sums.totals)
        num_BxKxDxGxT += read_BxKxDxGxT if shrink is None else read_BxKxDxGxT * shrink[:, :, None]
        den_BxKxGxT += total_BxKxGxT if shrink is None else total_BxKxGxT * shrink
    return num_BxKxDxGxT, den_BxKxGxT


def fold(shape: Shape, keys: BlockKeys, parameters: Any, bounds: Bounds | None, start: Any) -> Sums:
    """The sums over these keys, of index `start` and on, except those outside of the bounds."""
    y, one = shape.features(parameters, keys.k), None
    if bounds is not None:
        index = start + jnp.arange(y.shape[-1])
        one = (index >= bounds.first) & (index < bounds.last)
        y, one = jnp.where(one, y, 0), one.astype(jnp.float32)
    phi = expansion.expand(shape.options.powers, y, one)
    v = keys.v.astype(shape.dtype)
    return Sums(tuple(dot('bkrt,bkdt->bkrd', p, v) for p in phi), expansion.totals(shape.options.powers, y, one))


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
