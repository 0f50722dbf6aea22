"""Products of decayed pairs of one chunk in TPU kernels, where key channels have factors of their own.

Products are as in `lm.ops.channel_decay`: at level m, tokens of a second half of m tokens meet tokens of the first half
in the middle. F_m are the logs of the factors from or to the middle.

    w_ji = Σ_m Σ_e (k_j exp(F_m))_e (x_i exp(F_m))_e          each pair j < i belongs to one level m

The pairs in a block of 4 tokens belong to no level here. Their distances d cost less than two levels: a key fades from
token to token. A product with ones sums over the channels.

    y_0 = k        (y_d)_i = a_i (y_{d-1})_{i-1}        w_{i-d,i} = Σ_e (y_d)_i,e x_i,e

C tokens are on the rows here, and the channels of a pack of heads on the lanes, E in all: [C, E]. Halves of 8 tokens or
more are then whole registers, which change places at no cost. Rotations of lanes are the dearest operations of a v5e
beside products.

A v4 moves the rows of a register by one row at a time. There products with matrices of 0 and 1 take the place of
rotations. Elsewhere rotations are cheaper.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from lm.ops import platform
from lm.ops.dots import in_parts
from lm.ops.tpu import ROWS, SUBLANES, dot
from lm.ops.tpu.masks import choose, from_words, keep, take_diagonal, to_words
from lm.ops.tpu.order import Turns

NEAR = 4
"""Tokens of a block whose pairs belong to no level."""
LOG_2_E = 1.4426950408889634
LEAST = -256.0
"""The least log in powers of 2 that products sum; its factor is 0 in float32, as are all below -150."""

Kind = Callable[[jax.Array, jax.Array], jax.Array]
"""A function of the tokens of a row and of a column: whether a matrix has a 1 there."""


class LevelSums(NamedTuple):
    """The F_m of all levels m = 4, 8, …, and sums over the whole chunk.

    Attributes:
        levels: F_m, [C, E].
        since: from the start of the chunk to each token, [C, E].
        until: from after each token to the end, [C, E].
        total: the sum of all tokens, the same in each of 8 rows, [8, E]. A gradient is the sum of its rows.
        lasts: the sums of a token and the one or two before it, [C, E], where products sum; else none. Tokens of
            another block of 8 add nothing.
    """

    levels: list[jax.Array]
    since: jax.Array
    until: jax.Array
    total: jax.Array
    lasts: list[jax.Array]


NearSums = tuple[jax.Array, jax.Array, jax.Array]
"""Sums inside blocks of 8 tokens, [C, E] each: F_4; from the start of the block to each token; from after it to the
end."""


class Side(NamedTuple):
    """Vectors that meet the keys of the same chunk.

    Attributes:
        x: the vectors of a pack of heads, [C, E] float32.
        own: whether tokens meet their own keys. The keys do not.
    """

    x: jax.Array
    own: bool


class Parted(NamedTuple):
    """The rows of all first halves of m tokens, 8 or more, and of all second halves, [C / 2, columns] each."""

    first: jax.Array
    second: jax.Array

    @classmethod
    def of_rows(cls, x: jax.Array, m: int) -> 'Parted':
        pieces = _cut(x, m)
        return cls(jnp.concatenate(pieces[::2]), jnp.concatenate(pieces[1::2]))

    def in_order(self, m: int) -> jax.Array:
        """Undoes `of_rows`."""
        pairs = zip(*(_cut(x, m) for x in self), strict=True)
        return jnp.concatenate([x for pair in pairs for x in pair])


def _cut(x: jax.Array, m: int) -> list[jax.Array]:
    return [x[at : at + m] for at in range(0, len(x), m)]


def _rotate(x: jax.Array, by: int) -> jax.Array:
    """Rotates the 8 rows of each register."""
    return jnp.concatenate([_roll(register, by) for register in _cut(x, SUBLANES)])


def pack(of_heads_ExC: Sequence[jax.Array]) -> jax.Array:
    """Returns the tokens of a pack of heads, [C, E] float32."""
    return jnp.concatenate(of_heads_ExC).T.astype(jnp.float32)


def unpack(x_CxE: jax.Array, heads: int) -> list[jax.Array]:
    """Returns the tokens of each head of a pack, [E, C] each."""
    return jnp.split(x_CxE.T, heads)


def sum_levels(log_ExC: jax.Array, dtype: DTypeLike, by_products: bool) -> LevelSums:
    """Sums the log factors of a chunk of a power of two tokens, at least 8, for operands of a type.

    `by_products`: products sum inside blocks of 8 tokens; in bfloat16 they take 16 bits of each log. Else rotations do.
    """
    near, lasts = _multiply_near(log_ExC, dtype) if by_products else (_add_near(log_ExC), [])
    middle, since, until = near
    levels, totals = [middle], _cut(since + until, SUBLANES)
    for m in _levels(since):
        if m < SUBLANES:
            continue
        sinces, untils = Parted.of_rows(since, m), Parted.of_rows(until, m)
        levels.append(Parted(untils.first, sinces.second).in_order(m))
        second = [_add_to_all(x, of) for x, of in zip(_cut(sinces.second, m), totals[::2], strict=True)]
        first = [_add_to_all(x, of) for x, of in zip(_cut(untils.first, m), totals[1::2], strict=True)]
        since = Parted(sinces.first, jnp.concatenate(second)).in_order(m)
        until = Parted(jnp.concatenate(first), untils.second).in_order(m)
        totals = [a + b for a, b in zip(totals[::2], totals[1::2], strict=True)]
    return LevelSums(levels, since, until, totals[0], lasts)


class SumGradients:
    """The gradients of sums of log factors, taken from the widest level down."""

    def __init__(self, since: jax.Array, until: jax.Array, total: jax.Array):
        """Takes the gradients of `since`, `until` and `total` of a `LevelSums`."""
        self._since, self._until, self._totals = since, until, [total]

    def add(self, m: int, dlevel: Parted) -> None:
        """Adds the gradient of F_m, m >= 8; every level has its turn."""
        since, until = Parted.of_rows(self._since, m), Parted.of_rows(self._until, m)
        pairs = zip(self._totals, _cut(until.first, m), _cut(since.second, m), strict=True)
        self._totals = [x for d, first, second in pairs for x in (d + fold_rows(second), d + fold_rows(first))]
        self._since = Parted(since.first, since.second + dlevel.second).in_order(m)
        self._until = Parted(until.first + dlevel.first, until.second).in_order(m)

    def finish(self, dmiddle: jax.Array, dtype: DTypeLike, by_products: bool) -> jax.Array:
        """Returns the gradient of the log factors, [C, E], from the gradient of F_4 and from what was added."""
        differentiate = _differentiate_products if by_products else _differentiate_additions
        return differentiate(dmiddle, self._since, self._until, jnp.concatenate(self._totals), dtype)


def _add_near(log_ExC: jax.Array) -> NearSums:
    """Sums by rotations."""
    total = since = log_ExC.T
    until = middle = jnp.zeros_like(since)
    for m in (1, 2, 4):
        if m == NEAR:
            middle = _select(m, since, until)
        sibling = _exchange(total, m)
        since += _select(m, sibling, 0.0)
        until += _select(m, 0.0, sibling)
        total += sibling
    return middle, since, until


def _multiply_near(log_ExC: jax.Array, dtype: DTypeLike) -> tuple[NearSums, list[jax.Array]]:
    """Sums by products; the second result is `LevelSums.lasts`."""
    # A product of 0 and an infinite log would not be 0.
    log_ExC = jnp.maximum(log_ExC, LEAST)
    are_last = [functools.partial(_is_last, count=count) for count in range(2, NEAR)]
    size, kinds = log_ExC.shape[1], [_is_to_middle, _is_since, _is_until, *are_last]
    if dtype == jnp.float32:
        middle, since, until, *lasts = _cut(dot(_make_blocks(kinds, size, dtype), log_ExC, (1, 1)), size)
        return (middle, since, until), lasts
    high, low = in_parts(log_ExC, 2)
    # Both parts of half of the tokens fill a matrix unit.
    sums = _make_blocks(kinds, size, dtype, repeats=2)
    is_first = lax.broadcasted_iota(jnp.int32, (1, size), 1) < size // 2
    halves = [(high, _roll_lanes(low, size // 2)), (_roll_lanes(high, size // 2), low)]
    found = [_cut(dot(sums, choose(is_first, *pair), (1, 1)), size // 2) for pair in halves]
    middle, since, until, *lasts = (jnp.concatenate(pair) for pair in zip(*found, strict=True))
    return (middle, since, until), lasts


def _differentiate_additions(dmiddle, dsince, duntil, dtotal, _) -> jax.Array:
    for m in (4, 2, 1):
        dtotal += _exchange(_select(m, dsince, duntil) + dtotal, m)
        if m == NEAR:
            dsince += _select(m, dmiddle, 0.0)
            duntil += _select(m, 0.0, dmiddle)
    return dsince + dtotal


def _differentiate_products(dmiddle, dsince, duntil, dtotal, dtype) -> jax.Array:
    # The total of 8 tokens is the sum of `since` and `until` of any of them.
    size = len(dsince)
    sums = _make_blocks([_is_to_middle, _is_since, _is_until], size, dtype, turned=True)
    pairs = zip(_cut(sums, size), (dmiddle, dsince + dtotal, duntil + dtotal), strict=True)
    return _add([dot(of, x.astype(dtype), (1, 0)) for of, x in pairs])


def _make_blocks(
    kinds: Sequence[Kind], size: int, dtype: DTypeLike, repeats: int = 1, turned: bool = False
) -> jax.Array:
    """Returns matrices of C columns, one below the other: 1 for pairs of a kind in a block of 8 tokens, else 0.

    Args:
        kinds: functions of the tokens of a row and of a column, counted in their block of 8.
        size: C.
        dtype: the type of the matrices.
        repeats: how many times the columns of each matrix repeat its C / `repeats` tokens.
        turned: exchange the tokens of rows and columns.
    """
    height = SUBLANES * 4 // jnp.dtype(dtype).itemsize
    row, column = (lax.broadcasted_iota(jnp.int32, (height, size), axis) for axis in (0, 1))
    is_same = row // SUBLANES == column % height // SUBLANES
    i, t = (column, row) if turned else (row, column)
    patterns = [jnp.where(is_same & kind(i % SUBLANES, t % SUBLANES), 1.0, 0.0).astype(dtype) for kind in kinds]
    return jnp.concatenate([x for pattern in patterns for x in _spread_blocks(pattern, size // repeats)])


def _spread_blocks(x: jax.Array, rows: int) -> list[jax.Array]:
    """Returns the rows of a matrix that has the lanes of x in blocks on its diagonal, and 0 elsewhere."""
    lane = lax.broadcasted_iota(jnp.int32, (1, x.shape[1]), 1) % rows // len(x)
    return [keep(x, lane == at) for at in range(rows // len(x))]


def _is_last(i: jax.Array, t: jax.Array, count: int) -> jax.Array:
    return (t <= i) & (t > i - count)


def _is_since(i: jax.Array, t: jax.Array) -> jax.Array:
    return t <= i


def _is_until(i: jax.Array, t: jax.Array) -> jax.Array:
    return t > i


def _is_to_middle(i: jax.Array, t: jax.Array) -> jax.Array:
    """Returns True for the tokens between a token and the middle of its block of 8."""
    return (i // NEAR == t // NEAR) & ((t > i) ^ (i >= NEAR))


def _levels(x_CxE: jax.Array) -> list[int]:
    return [1 << n for n in range(len(x_CxE).bit_length() - 1)]


def _add_to_all(x: jax.Array, total_8xE: jax.Array) -> jax.Array:
    return (x.reshape(-1, SUBLANES, x.shape[1]) + total_8xE).reshape(x.shape)


def fold_rows(x: jax.Array) -> jax.Array:
    """Returns 8 rows whose sum is the sum of all rows."""
    return x.reshape(-1, SUBLANES, x.shape[1]).sum(0)


def _add(terms: Sequence[jax.Array]) -> jax.Array:
    """Adds one term or more, and no zero before them."""
    return functools.reduce(jnp.add, terms)


def _select(m: int, second: jax.Array | float, first: jax.Array | float) -> jax.Array:
    """Returns the rows of `second` in second halves of m rows, m < 8, and of `first` in the others."""
    like = second if isinstance(second, jax.Array) else cast(jax.Array, first)
    # One mask serves all registers.
    is_second = (lax.broadcasted_iota(jnp.int32, (1, SUBLANES, like.shape[1]), 1) & m) != 0
    second, first = (x.reshape(-1, SUBLANES, x.shape[1]) if isinstance(x, jax.Array) else x for x in (second, first))
    return jnp.where(is_second, second, first).reshape(like.shape)


def _add_second(x: jax.Array, second: jax.Array, m: int) -> jax.Array:
    """Returns x with the rows of its second halves added."""
    halves = Parted.of_rows(x, m)
    return Parted(halves.first, halves.second + second).in_order(m)


def _exchange(x_CxE: jax.Array, m: int) -> jax.Array:
    """Returns the rows of the other half of each token's block of 2 m."""
    later = _rotate(x_CxE, m)
    return later if 2 * m == SUBLANES else _select(m, later, _rotate(x_CxE, -m))


def _roll(x: jax.Array, by: int) -> jax.Array:
    return pltpu.roll(x, by % len(x), 0)


def _roll_lanes(x: jax.Array, by: int) -> jax.Array:
    return from_words(pltpu.roll(to_words(x), by, 1), x.dtype)


class ChannelPairs:
    """The keys of a chunk of a pack of heads, and the factors by which its tokens fade the states.

    The heads of a pack lie side by side on the lanes, so that heads of 64 channels leave no lane idle.

    Attributes:
        dtype: the type of the operands of products.
        k: keys, [C, E] float32.
        sums: the sums of log factors, in powers of 2.
        factors: exp(F_m) of all levels.
        factor: the factors of the tokens, [C, E].
        faded: y_d of the distances 0 to 3. Tokens whose block of 4 begins later are finite, but mean nothing.
    """

    def __init__(self, k_ExC: Sequence[jax.Array], log_ExC: Sequence[jax.Array]):
        """Takes the keys and log factors of each head."""
        self.dtype, self.heads, self.k = k_ExC[0].dtype, len(k_ExC), pack(k_ExC)
        self.by_products = platform.rotates_by_steps()
        # Powers of 2 cost one multiplication less than exponentials.
        logs = jnp.concatenate(log_ExC) * LOG_2_E
        self.sums = sum_levels(logs, self.dtype, self.by_products)
        self.factors = [jnp.exp2(level) for level in self.sums.levels]
        self.factor, self.faded = jnp.exp2(logs.T), [self.k]
        if self.by_products:
            lasts = map(jnp.exp2, self.sums.lasts)
            for d, factor in enumerate([self.factor, *lasts], 1):
                self.faded.append(factor * pack([_roll_lanes(k, d) for k in k_ExC]))
        while len(self.faded) < NEAR:
            self.faded.append(self.factor * _rotate(self.faded[-1], 1))

    def fade(self, x_CxE: jax.Array, factors_CxE: jax.Array) -> jax.Array:
        """Multiplies vectors by factors; the result is an operand."""
        return (x_CxE * factors_CxE).astype(self.dtype)

    def meet(self, x_ExC: Sequence[jax.Array]) -> Side:
        """Returns the side of each head's vectors that the keys meet."""
        return Side(pack(x_ExC), True)

    @property
    def keys(self) -> Side:
        """The keys as the side that the keys meet."""
        return Side(self.k, False)

    def pick(self, x: jax.Array, p: int) -> jax.Array:
        """Returns the lanes of head p of the pack, 0 elsewhere."""
        return x if self.heads == 1 else keep(x, self._is_of(x, p))

    def merge(self, of_heads: Iterable[jax.Array]) -> jax.Array:
        """Returns the lanes of each head from its own array."""
        merged, *more = of_heads
        for p, x in enumerate(more, 1):
            merged = jnp.where(self._is_of(x, p), x, merged)
        return merged

    def weigh(self, sides: Sequence[Side]) -> Turns:
        """Returns, for each side, the products of keys j and its vectors i for j <= i of each head.

        The products are [C, C] float32, 0 elsewhere. Keys meet later keys alone, j < i.
        """
        near, size = self._weigh_near(sides), len(self.k)
        yield
        pairs = [[jnp.zeros((size, size))] * self.heads for _ in sides]
        self._weigh_middle(sides, near)
        yield
        for m, factors in self._levels()[1:]:
            keys = Parted.of_rows(self.k * factors, m).first.astype(self.dtype)
            operand = self._make_operand(sides, factors, m)
            of_heads = jnp.split(dot(self._stack(keys), operand, (1, 1)), self.heads)
            for p, products in enumerate(of_heads):
                for n, product in enumerate(jnp.split(products, len(sides), axis=1)):
                    pairs[n][p] = self._put(product, pairs[n][p], m)
            yield
        both = zip(near, pairs, strict=True)
        return [[self._put_near(*head) for head in zip(*of_side, strict=True)] for of_side in both]

    def differentiate(self, sides: Sequence[Side], dpairs: Sequence[Sequence[jax.Array]], dsums: SumGradients) -> Turns:
        """Returns gradients [C, E] from the gradients of the products of keys with each side and head, and of the sums.

        They are of the keys, on both sides, of each side that is not the keys, and of the log factors.
        """
        near = [[take_diagonal(d) for d in of_heads] for of_heads in dpairs]
        rounded = [[d.astype(self.dtype) for d in of_heads] for of_heads in dpairs]
        dkeys, dsides, dlog = self._differentiate_near(sides, near)
        yield
        dkey, dmiddle = self._differentiate_middle(sides, near, dsides)
        dkeys += dkey
        yield
        for m, factors in reversed(self._levels()[1:]):
            of, k = Parted.of_rows(factors, m), Parted.of_rows(self.k, m)
            operand, keys = self._make_operand(sides, factors, m), self._stack((k.first * of.first).astype(self.dtype))
            ds = [[self._take(d, m) for d in of_heads] for of_heads in (dpairs if m < ROWS else rounded)]
            stacked = [jnp.concatenate(of_heads).astype(self.dtype) for of_heads in ds]
            dkey = of.first * self.merge(jnp.split(dot(jnp.concatenate(stacked, axis=1), operand, (1, 0)), self.heads))
            dlater, dlevel = [], []
            for n, (side, of_heads) in enumerate(zip(sides, ds, strict=True)):
                later = Parted.of_rows(jnp.concatenate(of_heads).T, m).second.astype(self.dtype)
                dside = of.second * dot(later, keys, (1, 0))
                dlevel.append(dside * Parted.of_rows(side.x, m).second)
                if not side.own:
                    dlater.append(dside)
                else:
                    dsides[n] = _add_second(dsides[n], dside, m)
            dkeys += Parted(dkey, _add(dlater) if dlater else jnp.zeros_like(dkey)).in_order(m)
            dsums.add(m, Parted(dkey * k.first, _add(dlevel)))
            yield
        dsides = [d for side, d in zip(sides, dsides, strict=True) if side.own]
        return dkeys, dsides, dlog + dsums.finish(dmiddle, self.dtype, self.by_products)

    @functools.cached_property
    def since(self) -> jax.Array:
        """The share of the state before the chunk that is left at each token, [C, E]."""
        return jnp.exp2(self.sums.since)

    @functools.cached_property
    def until(self) -> jax.Array:
        """The share of each token that is left after the chunk, [C, E]."""
        return jnp.exp2(self.sums.until)

    @functools.cached_property
    def whole(self) -> jax.Array:
        """The share of the state before the chunk that is left after the chunk, [1, E]."""
        return jnp.exp2(self.sums.total[:1])

    def _levels(self) -> list[tuple[int, jax.Array]]:
        return list(zip([m for m in _levels(self.k) if m >= NEAR], self.factors, strict=True))

    def _weigh_near(self, sides: Sequence[Side]) -> list[list[jax.Array]]:
        """Returns the products of pairs in a block of 4 tokens, for each side and head, [8, C].

        Rows are the tokens of the 8 around a key, and 0 where there is no pair.
        """
        which = [(n, d) for n, side in enumerate(sides) for d in range(0 if side.own else 1, NEAR)]
        faded = jnp.concatenate([(self.faded[d] * sides[n].x).astype(self.dtype) for n, d in which])
        none = jnp.zeros((SUBLANES, len(self.k)))
        near = [[none] * self.heads for _ in sides]
        for (n, d), of_heads in zip(which, jnp.split(dot(self._ones, faded, (1, 1)), len(which), axis=1), strict=True):
            heads = zip(_cut(of_heads, SUBLANES), near[n], strict=True)
            near[n] = [jnp.where(self._is_apart(d), new, old) for new, old in heads]
        return near

    def _differentiate_near(self, sides: Sequence[Side], dnear: Sequence[Sequence[jax.Array]]):
        """Returns the gradients that pairs in a block of 4 tokens give to keys, sides and log factors.

        `dnear` has the gradients of what `_weigh_near` returns. Where there is no pair they may be anything.
        """
        dsides, dfaded, dlog = [[] for _ in sides], [], []
        for d in reversed(range(NEAR)):
            here = [n for n, side in enumerate(sides) if d or side.own]
            masked = [jnp.concatenate([jnp.where(self._is_apart(d), x, 0.0) for x in dnear[n]]) for n in here]
            if here:
                spread = dot(jnp.concatenate(masked, axis=1).astype(self.dtype), self._ones, (0, 0))
                for n, of_side in zip(here, jnp.split(spread, len(here)), strict=True):
                    dsides[n].append(of_side * self.faded[d])
                    dfaded.append(of_side * sides[n].x)
            total = _add(dfaded)
            if d:
                dlog.append(total * self.faded[d])
                dfaded = [_rotate(self.factor * total, -1)]
        of_keys = [_add(terms) for side, terms in zip(sides, dsides, strict=True) if not side.own]
        return _add([total, *of_keys]), [_add(terms) for terms in dsides], _add(dlog)

    def _put_near(self, near_8xC: jax.Array, pairs_CxC: jax.Array) -> jax.Array:
        """Returns the pairs with pairs in the same block of 8 tokens."""
        lane = lax.broadcasted_iota(jnp.int32, near_8xC.shape, 1) // SUBLANES
        rows = enumerate(_cut(pairs_CxC, SUBLANES))
        return jnp.concatenate([jnp.where(lane == at, near_8xC, x) for at, x in rows])

    def _weigh_middle(self, sides: Sequence[Side], near: Sequence[list[jax.Array]]) -> None:
        """Puts the products of pairs of both halves of 8 tokens into `near`."""
        operand = self._make_operand(sides, self.factors[0], NEAR)
        for p, keys in zip(range(0, self.heads, 2), self._couple_keys(), strict=True):
            for n, product in enumerate(jnp.split(dot(keys, operand, (1, 1)), len(sides), axis=1)):
                found = take_diagonal(product)
                near[n][p] = jnp.where(self._is_halved, found, near[n][p])
                if p + 1 < self.heads:
                    near[n][p + 1] = jnp.where(self._is_halved, _roll(found, NEAR), near[n][p + 1])

    def _differentiate_middle(self, sides: Sequence[Side], dnear: Sequence[Sequence[jax.Array]], dsides):
        """Returns the gradients that pairs of both halves of 8 tokens give to keys and F_4; adds to `dsides`."""
        factors = self.factors[0]
        operand, couples = self._make_operand(sides, factors, NEAR), self._couple_keys()
        ds = [self._couple(of_heads) for of_heads in dnear]
        of_heads = []
        for of_sides in zip(*ds, strict=True):
            found = dot(jnp.concatenate(of_sides, axis=1), operand, (1, 0))
            of_heads += [found, _rotate(found, NEAR)]
        dkey = factors * _select(NEAR, 0.0, self.merge(of_heads[: self.heads]))
        dkeys, dlevel = [dkey], [dkey * self.k]
        for n, (side, of_side) in enumerate(zip(sides, ds, strict=True)):
            dside = factors * _add([dot(d.T, keys, (1, 0)) for d, keys in zip(of_side, couples, strict=True)])
            dlevel.append(dside * side.x)
            if side.own:
                dsides[n] += dside
            else:
                dkeys.append(dside)
        return _add(dkeys), _add(dlevel)

    def _couple_keys(self) -> list[jax.Array]:
        """Returns the keys of the first halves of 8 tokens for each two heads, as operands [C, E].

        Keys of the second head take the places of second halves. A single head leaves there what no product reads.
        """
        words = to_words(self.fade(self.k, self.factors[0]))
        if self.heads == 1:
            return [from_words(words, self.dtype)]
        # A block of 8 tokens of bfloat16 takes 4 rows of words.
        half = NEAR * self.dtype.itemsize // 4
        both = _select(half, _rotate(words, half), words)
        is_second = (lax.broadcasted_iota(jnp.int32, (SUBLANES, both.shape[1]), 0) & half) != 0
        couples = []
        for p in range(0, self.heads, 2):
            mask = self._is_of(both, p) & ~is_second | self._is_of(both, p + 1) & is_second
            couples.append(jnp.concatenate([keep(from_words(x, self.dtype), mask) for x in _cut(both, SUBLANES)]))
        return couples

    def _couple(self, dnear: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the gradients of pairs of both halves of 8 tokens as `_couple_keys` has keys, operands [C, C]."""
        size, couples = len(self.k), []
        lane = lax.broadcasted_iota(jnp.int32, (1, size), 1)
        for p in range(0, self.heads, 2):
            both = jnp.where(self._is_halved, dnear[p], 0.0)
            if p + 1 < self.heads:
                both += _roll(jnp.where(self._is_halved, dnear[p + 1], 0.0), NEAR)
            # As many blocks of 8 rows as a register of operands holds.
            count = 4 // self.dtype.itemsize
            blocks = [jnp.where(lane // SUBLANES % count == n, both, 0.0) for n in range(count)]
            couples.append(jnp.concatenate(_spread_blocks(jnp.concatenate(blocks).astype(self.dtype), size)))
        return couples

    def _stack(self, x: jax.Array) -> jax.Array:
        """Returns the lanes of each head, one head below the other, 0 elsewhere."""
        return jnp.concatenate([self.pick(x, p) for p in range(self.heads)])

    def _make_operand(self, sides: Sequence[Side], factors: jax.Array, m: int) -> jax.Array:
        """Returns all sides, one below the other. First halves may be anything finite: no pair takes them."""
        if m < SUBLANES:
            return jnp.concatenate([side.x * factors for side in sides]).astype(self.dtype)
        seconds = [Parted.of_rows(side.x * factors, m).second for side in sides]
        return jnp.concatenate([Parted(jnp.zeros_like(x), x).in_order(m) for x in seconds]).astype(self.dtype)

    def _put(self, product: jax.Array, pairs_CxC: jax.Array, m: int) -> jax.Array:
        """Returns the pairs with pairs of level m, 8 or more, of which `product` has the rows of the first halves."""
        rows = Parted.of_rows(pairs_CxC, m)
        cut = zip(_cut(product, m), _cut(rows.first, m), strict=True)
        first = [jnp.where(self._is_in(at, m), new, old) for at, (new, old) in enumerate(cut)]
        return Parted(jnp.concatenate(first), rows.second).in_order(m)

    def _take(self, dpairs_CxC: jax.Array, m: int) -> jax.Array:
        """Returns the rows of the first halves, 0 but for pairs of level m, 8 or more."""
        if 2 * m == len(self.k):
            # No product reads the others.
            return dpairs_CxC[:m]
        cut = enumerate(_cut(Parted.of_rows(dpairs_CxC, m).first, m))
        return jnp.concatenate([keep(x, self._is_in(at, m)) for at, x in cut])

    def _is_in(self, at: int, m: int) -> jax.Array:
        """Returns True for the tokens of the second half of block `at`, [1, C]."""
        i = lax.broadcasted_iota(jnp.int32, (1, len(self.k)), 1)
        return (i >= (2 * at + 1) * m) & (i < (2 * at + 2) * m)

    def _is_of(self, x: jax.Array, p: int) -> jax.Array:
        """Returns True in the lanes of head p, [1, E]."""
        size = x.shape[1] // self.heads
        lane = lax.broadcasted_iota(jnp.int32, (1, x.shape[1]), 1)
        return (lane >= p * size) & (lane < (p + 1) * size)

    def _is_apart(self, d: int) -> jax.Array:
        """Returns True for pairs of this distance in a block of 4 tokens, [8, C]; rows are keys of the same 8."""
        j, i = (lax.broadcasted_iota(jnp.int32, (SUBLANES, len(self.k)), axis) for axis in (0, 1))
        return ((i - d) % SUBLANES == j) & (i % NEAR >= d)

    @functools.cached_property
    def _is_halved(self) -> jax.Array:
        """True for pairs of both halves of 8 tokens, [8, C]."""
        j, i = (lax.broadcasted_iota(jnp.int32, (SUBLANES, len(self.k)), axis) for axis in (0, 1))
        return (j < NEAR) & (i % SUBLANES >= NEAR)

    @functools.cached_property
    def _ones(self) -> jax.Array:
        """An operand of 8 rows for each head: 1 on the lanes of the head, else 0."""
        row, lane = (lax.broadcasted_iota(jnp.int32, (SUBLANES * self.heads, self.k.shape[1]), axis) for axis in (0, 1))
        return (row // SUBLANES == lane // (self.k.shape[1] // self.heads)).astype(jnp.float32).astype(self.dtype)
