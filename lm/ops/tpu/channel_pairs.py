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
"""

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from lm.ops.tpu import SUBLANES, dot
from lm.ops.tpu.order import Turns

NEAR = 4
"""Tokens of a block whose pairs belong to no level."""
LOG_2_E = 1.4426950408889634


class LevelSums(NamedTuple):
    """The F_m of all levels m = 4, 8, …, and sums over the whole chunk.

    Attributes:
        levels: F_m, [C, E].
        since: from the start of the chunk to each token, [C, E].
        until: from after each token to the end, [C, E].
        total: the sum of all tokens, the same in each of 8 rows, [8, E]. A gradient is the sum of its rows.
    """

    levels: list[jax.Array]
    since: jax.Array
    until: jax.Array
    total: jax.Array


class Side(NamedTuple):
    """Vectors that meet the keys of the same chunk.

    Attributes:
        x: the vectors of a pack of heads, [C, E] float32.
        own: for each head, the products of tokens with themselves, [1, C] float32; no factor changes them. None: the
            vectors are the keys, and no token meets itself.
    """

    x: jax.Array
    own: list[jax.Array] | None


class PairGradients(NamedTuple):
    """The gradients that pairs give, all [C, E].

    Attributes:
        keys: to the keys, on both sides.
        sides: to each side that is not the keys.
        levels: to the F_m.
        log: to the log factors of pairs in a block of 4 tokens.
    """

    keys: jax.Array
    sides: list[jax.Array]
    levels: list[jax.Array]
    log: jax.Array


class Parted(NamedTuple):
    """The rows of all first halves of m tokens, and of all second halves, [C / 2, columns] each.

    Halves of 8 rows or more come block by block. Two registers A and B with smaller halves swap them. The first
    halves of A stay, and the first halves of B take the rows of A's second halves. So do the second halves of B.
    """

    first: jax.Array
    second: jax.Array

    @classmethod
    def of_rows(cls, x: jax.Array, m: int) -> 'Parted':
        if m >= SUBLANES:
            pieces = _cut(x, m)
            return cls(jnp.concatenate(pieces[::2]), jnp.concatenate(pieces[1::2]))
        a, b = _cut_registers(x)
        second = _is_second(a, m)
        return cls(jnp.where(second, _rotate(b, m), a), jnp.where(second, b, _rotate(a, -m)))

    def in_order(self, m: int) -> jax.Array:
        """Undoes `of_rows`."""
        if m >= SUBLANES:
            pairs = zip(*(_cut(x, m) for x in self), strict=True)
            return jnp.concatenate([x for pair in pairs for x in pair])
        second = _is_second(self.first, m)
        a = jnp.where(second, _rotate(self.second, m), self.first)
        b = jnp.where(second, self.second, _rotate(self.first, -m))
        pairs = zip(_cut(a, SUBLANES), _cut(b, SUBLANES), strict=True)
        return jnp.concatenate([x for pair in pairs for x in pair])


def _cut(x: jax.Array, m: int) -> list[jax.Array]:
    return [x[at : at + m] for at in range(0, len(x), m)]


def _cut_registers(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns every second register's rows."""
    registers = _cut(x, SUBLANES)
    return jnp.concatenate(registers[::2]), jnp.concatenate(registers[1::2])


def _rotate(x: jax.Array, by: int) -> jax.Array:
    """Rotates the 8 rows of each register."""
    return jnp.concatenate([_roll(register, by) for register in _cut(x, SUBLANES)])


def pack(of_heads_ExC: Sequence[jax.Array]) -> jax.Array:
    """Returns the tokens of a pack of heads, [C, E] float32."""
    return jnp.concatenate(of_heads_ExC).T.astype(jnp.float32)


def unpack(x_CxE: jax.Array, heads: int) -> list[jax.Array]:
    """Returns the tokens of each head of a pack, [E, C] each."""
    return jnp.split(x_CxE.T, heads)


def sum_levels(log_CxE: jax.Array) -> LevelSums:
    """Sums the log factors of a chunk of a power of two tokens, at least 8."""
    since, until, total, levels = log_CxE, jnp.zeros_like(log_CxE), log_CxE, []
    for m in _levels(log_CxE):
        if m >= SUBLANES:
            break
        second = _is_second(log_CxE, m)
        if m >= NEAR:
            levels.append(jnp.where(second, since, until))
        sibling = _exchange(total, m)
        since += jnp.where(second, sibling, 0.0)
        until += jnp.where(second, 0.0, sibling)
        total += sibling
    totals = _cut(total, SUBLANES)
    for m in _levels(log_CxE):
        if m < SUBLANES:
            continue
        sinces, untils = Parted.of_rows(since, m), Parted.of_rows(until, m)
        levels.append(Parted(untils.first, sinces.second).in_order(m))
        second = [_add_to_all(x, of) for x, of in zip(_cut(sinces.second, m), totals[::2], strict=True)]
        first = [_add_to_all(x, of) for x, of in zip(_cut(untils.first, m), totals[1::2], strict=True)]
        since = Parted(sinces.first, jnp.concatenate(second)).in_order(m)
        until = Parted(jnp.concatenate(first), untils.second).in_order(m)
        totals = [a + b for a, b in zip(totals[::2], totals[1::2], strict=True)]
    return LevelSums(levels, since, until, totals[0])


def differentiate_sums(gradients: LevelSums) -> jax.Array:
    """Returns the gradient of the log factors, [C, E]."""
    of_levels, dsince, duntil, dtotal = gradients
    steps, dtotals = _levels(dsince), [dtotal]
    dlevels = dict(zip([m for m in steps if m >= NEAR], of_levels, strict=True))
    while steps[-1] >= SUBLANES:
        m = steps.pop()
        dsinces, duntils, of = (Parted.of_rows(x, m) for x in (dsince, duntil, dlevels[m]))
        pairs = zip(dtotals, _cut(duntils.first, m), _cut(dsinces.second, m), strict=True)
        dtotals = [x for d, first, second in pairs for x in (d + fold_rows(second), d + fold_rows(first))]
        dsince = Parted(dsinces.first, dsinces.second + of.second).in_order(m)
        duntil = Parted(duntils.first + of.first, duntils.second).in_order(m)
    dtotal = jnp.concatenate(dtotals)
    for m in reversed(steps):
        second = _is_second(dsince, m)
        dtotal += _exchange(jnp.where(second, dsince, duntil) + dtotal, m)
        if m in dlevels:
            dsince += jnp.where(second, dlevels[m], 0.0)
            duntil += jnp.where(second, 0.0, dlevels[m])
    return dsince + dtotal


def _levels(x_CxE: jax.Array) -> list[int]:
    return [1 << n for n in range(len(x_CxE).bit_length() - 1)]


def _add_to_all(x: jax.Array, total_8xE: jax.Array) -> jax.Array:
    return (x.reshape(-1, SUBLANES, x.shape[1]) + total_8xE).reshape(x.shape)


def fold_rows(x: jax.Array) -> jax.Array:
    """Returns 8 rows whose sum is the sum of all rows."""
    return x.reshape(-1, SUBLANES, x.shape[1]).sum(0)


def _choose(x: jax.Array, blocks: int) -> jax.Array:
    """Returns [8, C] of [8 n, C]: of each 8 rows, the columns of the next `blocks` blocks of 8 tokens."""
    found, *others = _cut(x, SUBLANES)
    lane = lax.broadcasted_iota(jnp.int32, found.shape, 1)
    for at, rows in enumerate(others, 1):
        found = jnp.where(lane >= at * blocks * SUBLANES, rows, found)
    return found


def _multiply_own(x_ExC: jax.Array, k_ExC: jax.Array) -> jax.Array:
    """Returns the products of tokens with themselves, [1, C] float32."""
    return jnp.sum(x_ExC.astype(jnp.float32) * k_ExC.astype(jnp.float32), axis=0, keepdims=True)


def _add(terms: Sequence[jax.Array]) -> jax.Array:
    """Adds one term or more, and no zero before them."""
    return functools.reduce(jnp.add, terms)


def _is_second(x_CxE: jax.Array, m: int) -> jax.Array:
    return (lax.broadcasted_iota(jnp.int32, x_CxE.shape, 0) & m) != 0


def _add_second(x: jax.Array, second: jax.Array, m: int) -> jax.Array:
    """Returns x with the rows of its second halves added."""
    if m < SUBLANES:
        return x + Parted(jnp.zeros_like(second), second).in_order(m)
    halves = Parted.of_rows(x, m)
    return Parted(halves.first, halves.second + second).in_order(m)


def _exchange(x_CxE: jax.Array, m: int) -> jax.Array:
    """Returns the rows of the other half of each token's block of 2 m."""
    later = _rotate(x_CxE, m)
    return later if 2 * m == SUBLANES else jnp.where(_is_second(x_CxE, m), later, _rotate(x_CxE, -m))


def _roll(x: jax.Array, by: int) -> jax.Array:
    return pltpu.roll(x, by % len(x), 0)


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
        self.dtype, self.heads, self.k, self._keys = k_ExC[0].dtype, len(k_ExC), pack(k_ExC), k_ExC
        # Powers of 2 cost one multiplication less than exponentials.
        log = pack(log_ExC) * LOG_2_E
        self.sums = sum_levels(log)
        self.factors = [jnp.exp2(level) for level in self.sums.levels]
        self.factor, self.faded = jnp.exp2(log), [self.k]
        while len(self.faded) < NEAR:
            self.faded.append(self.factor * _rotate(self.faded[-1], 1))

    def fade(self, x_CxE: jax.Array, factors_CxE: jax.Array) -> jax.Array:
        """Multiplies vectors by factors; the result is an operand."""
        return (x_CxE * factors_CxE).astype(self.dtype)

    def meet(self, x_ExC: Sequence[jax.Array]) -> Side:
        """Returns the side of each head's vectors that the keys meet."""
        return Side(pack(x_ExC), [_multiply_own(x, k) for x, k in zip(x_ExC, self._keys, strict=True)])

    @property
    def keys(self) -> Side:
        """The keys as the side that the keys meet."""
        return Side(self.k, None)

    def pick(self, x: jax.Array, p: int) -> jax.Array:
        """Returns the lanes of head p of the pack, 0 elsewhere."""
        return x if self.heads == 1 else jnp.where(self._is_of(x, p), x, jnp.zeros((), x.dtype))

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
        for m, factors in self._levels():
            keys = Parted.of_rows(self.k * factors, m).first
            operand = self._make_operand(sides, factors, m)
            for p in range(self.heads):
                products = dot(self.pick(keys, p).astype(self.dtype), operand, (1, 1))
                for n, product in enumerate(jnp.split(products, len(sides), axis=1)):
                    if m == NEAR:
                        near[n][p] = jnp.where(self._is_halved, self._turn(_choose(product, 2)), near[n][p])
                    else:
                        pairs[n][p] = self._put(product, pairs[n][p], m)
            yield
        both = zip(near, pairs, strict=True)
        return [[self._put_near(*head) for head in zip(*of_side, strict=True)] for of_side in both]

    def differentiate(self, sides: Sequence[Side], dpairs: Sequence[Sequence[jax.Array]]) -> Turns:
        """Returns the `PairGradients` of the products of keys with `sides`, for each side and head."""
        near = [[_choose(d, 1) for d in of_heads] for of_heads in dpairs]
        dkeys, dsides, dlog = self._differentiate_near(sides, near)
        yield
        dlevels = []
        for m, factors in self._levels():
            of, k = Parted.of_rows(factors, m), Parted.of_rows(self.k, m)
            operand, key_operand = self._make_operand(sides, factors, m), (k.first * of.first).astype(self.dtype)
            if m == NEAR:
                ds = [[self._spread(d) for d in of_heads] for of_heads in near]
            else:
                ds = [[self._take(d, m) for d in of_heads] for of_heads in dpairs]
            dkey = of.first * self.merge(
                dot(jnp.concatenate(of_sides, axis=1).astype(self.dtype), operand, (1, 0))
                for of_sides in zip(*ds, strict=True)
            )
            dlater, dlevel = [], []
            for n, (side, of_heads) in enumerate(zip(sides, ds, strict=True)):
                later = [Parted.of_rows(d.T, m).second.astype(self.dtype) for d in of_heads]
                dside = of.second * self.merge(dot(d, key_operand, (1, 0)) for d in later)
                dlevel.append(dside * Parted.of_rows(side.x, m).second)
                if side.own is None:
                    dlater.append(dside)
                else:
                    dsides[n] = _add_second(dsides[n], dside, m)
            dkeys += Parted(dkey, _add(dlater) if dlater else jnp.zeros_like(dkey)).in_order(m)
            dlevels.append(Parted(dkey * k.first, _add(dlevel)).in_order(m))
            yield
        dsides = [d for side, d in zip(sides, dsides, strict=True) if side.own is not None]
        return PairGradients(dkeys, dsides, dlevels, dlog)

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

    def _levels(self) -> Iterable[tuple[int, jax.Array]]:
        return zip([m for m in _levels(self.k) if m >= NEAR], self.factors, strict=True)

    def _weigh_near(self, sides: Sequence[Side]) -> list[list[jax.Array]]:
        """Returns the products of pairs in a block of 4 tokens, for each side and head, [8, C].

        Rows are the tokens of the 8 around a key, and 0 where there is no pair.
        """
        which = [(n, d) for n in range(len(sides)) for d in range(1, NEAR)]
        faded = jnp.concatenate([(self.faded[d] * sides[n].x).astype(self.dtype) for n, d in which])
        none = jnp.zeros((SUBLANES, len(self.k)))
        near = [[jnp.where(self._is_apart(0), x, none) for x in side.own or [none] * self.heads] for side in sides]
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
            here = [n for n, side in enumerate(sides) if d or side.own is not None]
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
        of_keys = [_add(terms) for side, terms in zip(sides, dsides, strict=True) if side.own is None]
        return _add([total, *of_keys]), [_add(terms) for terms in dsides], _add(dlog)

    def _put_near(self, near_8xC: jax.Array, pairs_CxC: jax.Array) -> jax.Array:
        """Returns the pairs with pairs in the same block of 8 tokens."""
        lane = lax.broadcasted_iota(jnp.int32, near_8xC.shape, 1) // SUBLANES
        rows = enumerate(_cut(pairs_CxC, SUBLANES))
        return jnp.concatenate([jnp.where(lane == at, near_8xC, x) for at, x in rows])

    def _turn(self, x_8xC: jax.Array) -> jax.Array:
        """Exchanges the halves of each odd block of 8 tokens, as `Parted` has them."""
        odd = (lax.broadcasted_iota(jnp.int32, x_8xC.shape, 1) & SUBLANES) != 0
        return jnp.where(odd, _roll(x_8xC, NEAR), x_8xC)

    def _spread(self, dnear_8xC: jax.Array) -> jax.Array:
        """Returns the rows of the first halves of 4 tokens, 0 but for pairs with the second halves."""
        d = self._turn(jnp.where(self._is_halved, dnear_8xC, 0.0))
        lane = lax.broadcasted_iota(jnp.int32, d.shape, 1) // (2 * SUBLANES)
        return jnp.concatenate([jnp.where(lane == at, d, 0.0) for at in range(len(self.k) // (2 * SUBLANES))])

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
        cut = enumerate(_cut(Parted.of_rows(dpairs_CxC, m).first, m))
        return jnp.concatenate([jnp.where(self._is_in(at, m), x, 0.0) for at, x in cut])

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
