"""One block of linear attention: its queries read keys and sums, and its keys are added to the sums.

Tokens are the last axis of all arrays. G query heads share each of the K key heads; T queries, S keys. With a window of
N the keys are shifted by N against the queries: entry j of the block's keys is key j - N. The approximate part is
then ordinary causal attention to them, the exact part sees entries i + 1 … i + N.
"""

import dataclasses
import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from lm.ops import decay as decays
from lm.ops.decay import Decay
from lm.ops.dots import dot
from lm.ops.linear_attention import expansion
from lm.ops.linear_attention.types import ExpKernel, LocalKernel, Options, Sides, State, decay_state


class BlockTokens(NamedTuple):
    """The tokens of a block, or of all blocks; None where nothing reads them.

    Attributes:
        k_BxKxExS: keys, inputs of the feature map; S = T, with a window N + T.
        k_local_BxKxCxS: the keys that the exact kernel compares.
        q_BxKxExGxT: queries, inputs of the feature map.
        q_local_BxKxCxGxT: the queries that the exact kernel compares.
        decay: running sums of the keys' log factors; the sums before the block are decayed up to its entry 0.
    """

    v_BxKxDxS: jax.Array
    k_BxKxExS: jax.Array | None = None
    k_local_BxKxCxS: jax.Array | None = None
    q_BxKxExGxT: jax.Array | None = None
    q_local_BxKxCxGxT: jax.Array | None = None
    decay: Decay | None = None


class Bounds(NamedTuple):
    """Bounds on the indices of keys, int32."""

    first: jax.Array
    """Keys before this index do not exist."""
    last: jax.Array
    """Keys from this index on are left out of the sums."""
    older: jax.Array
    """Queries from this index on have an approximate part."""


class Sums(NamedTuple):
    """A `State` whose kv is in the pieces of the expansion, [B, K, Rᵢ, D]."""

    kv: tuple[jax.Array, ...]
    totals: tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Shape:
    """The static properties of a block."""

    options: Options
    tile: int
    """Rows of queries at a time: work above the diagonal is skipped tile by tile."""
    reads: bool
    """True where there are sums to read."""
    dtype: jnp.dtype
    """The type of the operands of the large products: the type of the values."""

    @property
    def lag(self) -> int:
        return self.options.window or 0

    @property
    def compares(self) -> bool:
        """True where features are compared inside the block."""
        return self.options.causal and (self.options.local is None or self.options.window is not None)

    def map_keys(self, parameters: object, k_BxKxExS: jax.Array) -> jax.Array:
        """Computes features [B, K, F, S]."""
        if self.options.feature_map is None:
            return k_BxKxExS.astype(self.dtype)
        y_BxSxKxF = self.options.compute_features(parameters, k_BxKxExS.transpose(0, 3, 1, 2), False)
        return y_BxSxKxF.astype(self.dtype).transpose(0, 2, 3, 1)

    def map_queries(self, parameters: object, q_BxKxExGxT: jax.Array) -> jax.Array:
        """Computes features [B, K, F, G, T]."""
        if self.options.feature_map is None:
            return q_BxKxExGxT.astype(self.dtype)
        x_BxTxHxF = self.options.compute_features(parameters, ungroup(q_BxKxExGxT), True)
        return group(x_BxTxHxF.astype(self.dtype), q_BxKxExGxT.shape[1])

    def find_log_factors(self, parameters: object, q_BxKxExGxT: jax.Array) -> jax.Array | None:
        """Computes the logs of the factors that approximate weights lack, [B, K, G, T]; None where they lack none."""
        log_BxTxH = self.options.find_log_factor(parameters, ungroup(q_BxKxExGxT))
        if log_BxTxH is None:
            return None
        return log_BxTxH.reshape(*log_BxTxH.shape[:2], q_BxKxExGxT.shape[1], -1).transpose(0, 2, 3, 1)


def move_tokens_last(x_BxSxKxF: jax.Array) -> jax.Array:
    """Returns [B, K, F, S]."""
    return x_BxSxKxF.transpose(0, 2, 3, 1)


def group(x_BxTxHxF: jax.Array, heads: int) -> jax.Array:
    """Returns [B, K, F, G, T] for K = `heads` key heads."""
    batch, count, total, size = x_BxTxHxF.shape
    return x_BxTxHxF.reshape(batch, count, heads, total // heads, size).transpose(0, 2, 4, 3, 1)


def ungroup(x_BxKxFxGxT: jax.Array) -> jax.Array:
    """Returns [B, T, H, F]."""
    batch, heads, size, groups, count = x_BxKxFxGxT.shape
    return x_BxKxFxGxT.transpose(0, 4, 1, 3, 2).reshape(batch, count, heads * groups, size)


def read(
    shape: Shape,
    tokens: BlockTokens,
    sums: Sums | None,
    *,
    parameters: Sides[Any],
    bounds: Bounds | None = None,
    start: jax.Array | int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Computes Σ_j w_ij v_j [B, K, D, G, T] and denominator_bias + Σ_j w_ij [B, K, G, T] of a block's queries, float32.

    Args:
        shape: the static properties of the block.
        tokens: its queries, and the keys that they see.
        sums: the sums over the keys before the block; None where there are none to read.
        bounds: bounds on the indices of keys; None: no bounds.
        start: index of the block's first key.
    """
    x, y, log_factor = None, None, None
    if tokens.q_BxKxExGxT is not None:
        x = shape.map_queries(parameters.queries, tokens.q_BxKxExGxT)
        log_factor = shape.find_log_factors(parameters.queries, tokens.q_BxKxExGxT)
    if shape.compares and x is not None and tokens.k_BxKxExS is not None:
        y = shape.map_keys(parameters.keys, tokens.k_BxKxExS[..., : x.shape[-1]])
    sums = None if x is None or not shape.reads else _weigh_sums(shape, sums, x.shape[2])
    make_tile = functools.partial(_Tile, shape, tokens, bounds, start, y=y, sums=sums)
    count, fractions = cast(jax.Array, tokens.q_local_BxKxCxGxT if x is None else x).shape[-1], []
    tops = range(0, count, shape.tile)
    # Split, not sliced: the gradient is then their concatenation, not a sum of padded ones.
    sizes = [min(shape.tile, count - top) for top in tops]
    xs, qs, logs = (
        [None] * len(tops) if a is None else lax.split(a, sizes, a.ndim - 1)
        for a in (x, tokens.q_local_BxKxCxGxT, log_factor)
    )
    for top, size, x_rows, q_rows, log_rows in zip(tops, sizes, xs, qs, logs, strict=True):
        rows, row_decay, newest = slice(top, top + size), None, None
        if tokens.decay is not None:
            first, last = rows.start + 1, rows.stop + 1
            newest = decays.entries(tokens.decay, *((first, last) if shape.lag else (0, 1)))
            row_decay = decays.entries(tokens.decay, first + shape.lag, last + shape.lag)
        row_T = jnp.arange(rows.start, rows.stop)
        tile = make_tile(rows, row_T, x_rows, q_rows, log_factor=log_rows, row_decay=row_decay, newest=newest)
        fractions.append(_read_tile(tile))
    if len(fractions) == 1:
        return fractions[0]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, -1), *fractions)


def read_one(
    shape: Shape, tokens: BlockTokens, sums: Sums, *, parameters: Sides[Any], bounds: Bounds, at: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes numerator and denominator of one query: token `at` of a block whose keys up to `at` are filled in."""
    q, count = cast(jax.Array, tokens.q_BxKxExGxT), tokens.v_BxKxDxS.shape[-1]
    x = shape.map_queries(parameters.queries, q)
    log_factor = shape.find_log_factors(parameters.queries, q)
    weighed, row_decay, newest = _weigh_sums(shape, sums, x.shape[2]), None, None
    if tokens.decay is not None:
        row_decay, newest = decays.entry(tokens.decay, at + 1), decays.entries(tokens.decay, 0, 1)
    rows, q_local = slice(count - 1, count), tokens.q_local_BxKxCxGxT
    return _read_tile(
        _Tile(shape, tokens, bounds, 0, rows, at[None], x, q_local, None, weighed, log_factor, row_decay, newest)
    )


def _weigh_sums(shape: Shape, sums: Sums | None, features: int) -> Sums | None:
    """Multiplies coefficients and counts into the sums, and makes operands of them."""
    if sums is None:
        return None
    weights = expansion.weights(shape.options.powers, features)
    return Sums(
        tuple((kv * w[:, None]).astype(shape.dtype) for kv, w in zip(sums.kv, weights, strict=True)), sums.totals
    )


@dataclasses.dataclass(frozen=True)
class _Tile:
    """Some rows of a block's queries.

    Attributes:
        shape, tokens, bounds, start: the block, as in `read`.
        rows: the range of rows; keys after them are skipped.
        row_T: the indices of the rows in the block.
        x: features of the rows; None where nothing reads them.
        q_local: the queries that the exact kernel compares.
        y: features of the block's keys; None where no features are compared.
        sums: the sums before the block as operands; None where there are none to read.
        log_factor: logs of the factors that approximate weights lack, [B, K, G, T]; None where they lack none.
        row_decay: running sums of log factors after the rows' tokens, [B, K, T]; None without decay.
        newest: running sum after the newest key out of the exact kernel's reach, [B, K, T] or [B, K, 1].
    """

    shape: Shape
    tokens: BlockTokens
    bounds: Bounds | None
    start: jax.Array | int
    rows: slice
    row_T: jax.Array
    x: jax.Array | None
    q_local: jax.Array | None
    y: jax.Array | None
    sums: Sums | None
    log_factor: jax.Array | None
    row_decay: Decay | None
    newest: Decay | None

    def is_visible(self, j: jax.Array, visible: jax.Array) -> jax.Array:
        """Hides keys j that do not exist."""
        return visible if self.bounds is None else visible & (self.start + j >= self.bounds.first)

    def log_factors(self, first: int, last: int, visible: jax.Array) -> jax.Array | None:
        """Computes the logs of the decay of keys `first` to before `last`, [B, K, S, 1, T]; -inf where not visible."""
        if self.row_decay is None or self.tokens.decay is None:
            return None
        later = jax.tree.map(lambda a: a[:, :, None, None], self.row_decay)
        earlier = jax.tree.map(lambda a: a[:, :, first + 1 : last + 1, None, None], self.tokens.decay)
        return jnp.where(visible, decays.between(later, earlier), -jnp.inf)

    def sum_factors(self) -> jax.Array:
        """Computes the decay of the sums over the keys before the block, [B, K, 1, T]."""
        before = decays.entries(cast(Decay, self.tokens.decay), 0, 1)
        return jnp.exp(decays.between(cast(Decay, self.row_decay), before))[:, :, None]

    def has_older(self) -> jax.Array:
        """Returns True for rows with weights other than exact ones: [T], with decay [B, K, 1, T]."""
        if self.shape.options.denominator_bias or self.bounds is None:
            return jnp.ones_like(self.row_T, bool)
        has_older_T = self.start + self.row_T >= self.bounds.older
        if self.row_decay is None or self.newest is None:
            return has_older_T
        # A reset may hide the keys out of the exact kernel's reach.
        return has_older_T & (self.row_decay.segment == self.newest.segment)[:, :, None]


def _read_tile(tile: _Tile) -> tuple[jax.Array, jax.Array]:
    """Adds the exact part, the approximate part and the part from the sums."""
    options, v = tile.shape.options, tile.tokens.v_BxKxDxS
    parts, scale_BxKxGxT, bias_scale = [], None, None
    if options.local is not None and tile.q_local is not None and tile.tokens.k_local_BxKxCxS is not None:
        w_BxKxSxGxT, values, scales = weigh_exactly(tile, options.local, tile.q_local, tile.tokens.k_local_BxKxCxS)
        parts.append((w_BxKxSxGxT, values))
        if scales is not None:
            scale_BxKxGxT, bias_scale = scales
    if tile.y is not None and tile.x is not None:
        w_BxKxSxGxT, values = weigh_features(tile, tile.x, tile.y)
        parts.append((w_BxKxSxGxT if scale_BxKxGxT is None else w_BxKxSxGxT * scale_BxKxGxT[:, :, None], values))
    lead = v.shape[:2] + cast(jax.Array, tile.q_local if tile.x is None else tile.x).shape[3:]
    num_BxKxDxGxT, den_BxKxGxT = jnp.float32(0.0), jnp.full(lead, options.denominator_bias, jnp.float32)
    den_BxKxGxT = den_BxKxGxT if bias_scale is None else den_BxKxGxT * bias_scale
    for weights, values in parts:
        num_BxKxDxGxT += dot('bkds,bksgt->bkdgt', values, weights.astype(v.dtype))
        den_BxKxGxT += weights.sum(2)
    if tile.x is not None and tile.sums is not None:
        num, den = read_sums(tile, tile.x, tile.sums)
        num_BxKxDxGxT += num if scale_BxKxGxT is None else num * scale_BxKxGxT[:, :, None]
        den_BxKxGxT += den if scale_BxKxGxT is None else den * scale_BxKxGxT
    return num_BxKxDxGxT, den_BxKxGxT


def weigh_exactly(
    tile: _Tile, local: LocalKernel, q_local: jax.Array, k_local: jax.Array
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, jax.Array] | None]:
    """Computes the exact weights [B, K, S, G, T].

    Returns:
        (the weights, the values of their keys, the scales of what stands beside them). The scales are [B, K, G, T], of
        approximate weights and of the bias; None: both are 1.
    """
    shape, row_T = tile.shape, tile.row_T
    first, last = (tile.rows.start + 1, tile.rows.stop + shape.lag) if shape.lag else (0, tile.rows.stop)
    s_BxKxSxGxT = dot('bkcs,bkcgt->bksgt', k_local[..., first:last], q_local)
    j = jnp.arange(first, last)[:, None, None]
    visible = ((j > row_T) & (j <= row_T + shape.lag)) if shape.lag else j <= row_T
    visible = tile.is_visible(j, visible)
    log_factors = tile.log_factors(first, last, visible)
    values = tile.tokens.v_BxKxDxS[..., first:last]
    if not isinstance(local, ExpKernel):
        w_BxKxSxGxT = jnp.where(visible, local.weigh(s_BxKxSxGxT), 0.0)
        return w_BxKxSxGxT if log_factors is None else w_BxKxSxGxT * jnp.exp(log_factors), values, None
    s_BxKxSxGxT = jnp.where(visible, s_BxKxSxGxT * local.scale, -jnp.inf)
    s_BxKxSxGxT = s_BxKxSxGxT if log_factors is None else s_BxKxSxGxT + log_factors
    if local.relative:
        s_BxKxSxGxT -= s_BxKxSxGxT.max(2, keepdims=True)
        if tile.log_factor is None:
            return jnp.exp(s_BxKxSxGxT), values, None
    log_BxKxGxT = jnp.float32(0.0) if tile.log_factor is None else tile.log_factor
    # Bias and approximate part are multiplied by exp(-m), which must not overflow; where there is neither,
    # only the largest exponent itself keeps its weight from underflow. m has no gradient: it is a factor of all terms.
    has_older_T = tile.has_older()
    m_BxKxGxT = jnp.maximum(s_BxKxSxGxT.max(2), jnp.where(has_older_T, log_BxKxGxT, -jnp.inf))
    if shape.options.denominator_bias:
        m_BxKxGxT = jnp.maximum(m_BxKxGxT, 0.0)
    m_BxKxGxT, unused = lax.stop_gradient((m_BxKxGxT, log_BxKxGxT))
    others = jnp.exp(log_BxKxGxT - jnp.where(has_older_T, m_BxKxGxT, unused))
    scales = jnp.where(has_older_T, others, 0.0), jnp.exp(-jnp.maximum(m_BxKxGxT, 0.0))
    return jnp.exp(s_BxKxSxGxT - m_BxKxGxT[:, :, None]), values, scales


def weigh_features(tile: _Tile, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes the approximate weights [B, K, S, G, T] of the block's keys; returns them and the keys' values."""
    stop = tile.rows.stop
    s_BxKxSxGxT = dot('bkfs,bkfgt->bksgt', y[..., :stop], x)
    j = jnp.arange(stop)[:, None, None]
    visible = tile.is_visible(j, j <= tile.row_T)
    w_BxKxSxGxT = jnp.where(visible, tile.shape.options.weigh(s_BxKxSxGxT), 0.0)
    log_factors = tile.log_factors(0, stop, visible)
    w_BxKxSxGxT = w_BxKxSxGxT if log_factors is None else w_BxKxSxGxT * jnp.exp(log_factors)
    return w_BxKxSxGxT, tile.tokens.v_BxKxDxS[..., :stop]


def read_sums(tile: _Tile, x: jax.Array, sums: Sums) -> tuple[jax.Array, jax.Array]:
    """Computes the part of the rows' numerators and denominators from the keys before the block."""
    powers = tile.shape.options.powers
    phis, x = expansion.expand(powers, x)
    num_BxKxDxGxT = sum(dot('bkrd,bkrgt->bkdgt', kv, phi) for kv, phi in zip(sums.kv, phis, strict=True))
    den_BxKxGxT = expansion.read_totals(powers, x, sums.totals)
    if tile.row_decay is not None:
        num_BxKxDxGxT *= tile.sum_factors()[:, :, None]
        den_BxKxGxT *= tile.sum_factors()
    return cast(jax.Array, num_BxKxDxGxT), den_BxKxGxT


def fold(
    shape: Shape,
    tokens: BlockTokens,
    parameters: object,
    bounds: Bounds | None = None,
    start: jax.Array | int = 0,
    log_factors_BxKxS: jax.Array | None = None,
) -> Sums:
    """Computes the sums over these keys, from index `start` on, without keys outside the bounds.

    `parameters` are the keys'. `log_factors_BxKxS` are the logs of the factors by which the keys have decayed in the
    sums; None: no decay.
    """
    y, one, factors = shape.map_keys(parameters, cast(jax.Array, tokens.k_BxKxExS)), None, None
    if bounds is not None:
        index = start + jnp.arange(y.shape[-1])
        inside = (index >= bounds.first) & (index < bounds.last)
        if log_factors_BxKxS is not None:
            log_factors_BxKxS = jnp.where(inside, log_factors_BxKxS, -jnp.inf)
        y, one = jnp.where(inside, y, 0), inside.astype(jnp.float32)
    phis, y = expansion.expand(shape.options.powers, y, one)
    v = tokens.v_BxKxDxS.astype(shape.dtype)
    if log_factors_BxKxS is not None:
        factors = jnp.exp(log_factors_BxKxS)
        v = (tokens.v_BxKxDxS.astype(jnp.float32) * factors[:, :, None]).astype(shape.dtype)
    kv = tuple(dot('bkrt,bkdt->bkrd', phi, v) for phi in phis)
    return Sums(kv, expansion.totals(shape.options.powers, y, one, factors))


def last_entry(decay: Decay, bounds: Bounds | None, start: jax.Array | int) -> Decay:
    """Returns the entry after a block, or after the last of its keys that belongs to the sums."""
    size = decay.total.shape[-1] - 1
    return decays.entry(decay, size if bounds is None else jnp.clip(bounds.last - start, 0, size))


def advance(
    shape: Shape, sums: Sums, tokens: BlockTokens, parameters: object, bounds: Bounds | None, start: jax.Array | int
) -> Sums:
    """Computes the sums after a block from the sums before it, decayed up to the `last_entry`."""
    log_factors_BxKxS = None
    if tokens.decay is not None:
        last = last_entry(tokens.decay, bounds, start)
        sums = decay_state(sums, decays.between(last, decays.entries(tokens.decay, 0, 1))[..., 0])
        log_factors_BxKxS = decays.between(last, decays.entries(tokens.decay, 1))
    return jax.tree.map(jnp.add, sums, fold(shape, tokens, parameters, bounds, start, log_factors_BxKxS))


def split(options: Options, state: State, features: int) -> Sums:
    """Cuts the state's kv in pieces."""
    pieces, at = [], 0
    for w in expansion.weights(options.powers, features):
        pieces.append(state.kv_BxKxRxD[:, :, at : at + len(w)])
        at += len(w)
    return Sums(tuple(pieces), state.totals)


def join(sums: Sums) -> State:
    """Inverts `split`."""
    return State(jnp.concatenate(sums.kv, axis=2), sums.totals)


def make_empty(options: Options, batch: int, heads: int, features: int, values: int) -> Sums:
    """Makes the sums over no keys, for F = features and D = values."""
    sizes = [len(w) for w in expansion.weights(options.powers, features)]
    kv = tuple(jnp.zeros((batch, heads, size, values), jnp.float32) for size in sizes)
    return Sums(kv, expansion.empty_totals(options.powers, batch, heads, features))
