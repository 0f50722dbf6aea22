"""Products of decayed pairs of one chunk in TPU kernels, where key channels have factors of their own.

Products are as in `lm.ops.channel_decay`: at level m, tokens of a second half of m tokens meet tokens of the first half
in the middle. F_m are the logs of the factors from or to the middle.

    w_ji = Σ_m Σ_e (k_j exp(F_m))_e (x_i exp(F_m))_e          each pair j < i belongs to one level m

C tokens are on the rows here, and the channels of a pack of heads on the lanes, E in all: [C, E]. Parted of 8 tokens or
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


class LevelSums(NamedTuple):
    """The F_m of all levels m = 1, 2, 4, …, and sums over the whole chunk.

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


class PairGradients(NamedTuple):
    """The gradients that pairs give to keys, to each side, and to the F_m; all [C, E]."""

    keys: jax.Array
    sides: list[jax.Array]
    levels: list[jax.Array]


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
        levels.append(jnp.where(second, since, until))
        sibling = _exchange(total, m)
        since += jnp.where(second, sibling, 0.0)
        until += jnp.where(second, 0.0, sibling)
        total += sibling
    totals = _cut(total, SUBLANES)
    for m in _levels(log_CxE)[len(levels) :]:
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
    dlevels, dsince, duntil, dtotal = gradients
    levels, dtotals = _levels(dsince), [dtotal]
    while levels and levels[-1] >= SUBLANES:
        m, dlevel = levels.pop(), dlevels[len(levels)]
        dsinces, duntils, of = (Parted.of_rows(x, m) for x in (dsince, duntil, dlevel))
        pairs = zip(dtotals, _cut(duntils.first, m), _cut(dsinces.second, m), strict=True)
        dtotals = [x for d, first, second in pairs for x in (d + fold_rows(second), d + fold_rows(first))]
        dsince = Parted(dsinces.first, dsinces.second + of.second).in_order(m)
        duntil = Parted(duntils.first + of.first, duntils.second).in_order(m)
    dtotal = jnp.concatenate(dtotals)
    for m, dlevel in reversed(list(zip(levels, dlevels, strict=False))):
        second = _is_second(dsince, m)
        dtotal += _exchange(jnp.where(second, dsince, duntil) + dtotal, m)
        dsince += jnp.where(second, dlevel, 0.0)
        duntil += jnp.where(second, 0.0, dlevel)
    return dsince + dtotal


def _levels(x_CxE: jax.Array) -> list[int]:
    return [1 << n for n in range(len(x_CxE).bit_length() - 1)]


def _add_to_all(x: jax.Array, total_8xE: jax.Array) -> jax.Array:
    return (x.reshape(-1, SUBLANES, x.shape[1]) + total_8xE).reshape(x.shape)


def fold_rows(x: jax.Array) -> jax.Array:
    """Returns 8 rows whose sum is the sum of all rows."""
    return x.reshape(-1, SUBLANES, x.shape[1]).sum(0)


def multiply_own(x_ExC: jax.Array, k_ExC: jax.Array) -> jax.Array:
    """Returns the products of tokens with themselves, [1, C] float32."""
    return jnp.sum(x_ExC.astype(jnp.float32) * k_ExC.astype(jnp.float32), axis=0, keepdims=True)


def _is_second(x_CxE: jax.Array, m: int) -> jax.Array:
    return (lax.broadcasted_iota(jnp.int32, x_CxE.shape, 0) & m) != 0


def _exchange(x_CxE: jax.Array, m: int) -> jax.Array:
    """Returns the rows of the other half of each token's block of 2 m."""
    return jnp.where(_is_second(x_CxE, m), _roll(x_CxE, m), _roll(x_CxE, -m))


def _roll(x: jax.Array, by: int) -> jax.Array:
    return pltpu.roll(x, by % len(x), 0)


class ChannelPairs:
    """The keys of a chunk of a pack of heads, and the factors by which its tokens fade the states.

    The heads of a pack lie side by side on the lanes, so that heads of 64 channels leave no lane idle.

    Attributes:
        dtype: the type of the operands of products.
        k: keys, [C, E] float32.
        sums: the sums of log factors.
        factors: exp(F_m) of all levels.
    """

    def __init__(self, k_ExC: Sequence[jax.Array], log_ExC: Sequence[jax.Array]):
        """Takes the keys and log factors of each head."""
        self.dtype, self.heads, self.k = k_ExC[0].dtype, len(k_ExC), pack(k_ExC)
        self.sums = sum_levels(pack(log_ExC))
        self.factors = [jnp.exp(level) for level in self.sums.levels]
        self._own_keys = [self.pick(self.k, p) for p in range(self.heads)]

    def fade(self, x_CxE: jax.Array, factors_CxE: jax.Array) -> jax.Array:
        """Multiplies vectors by factors; the result is an operand."""
        return (x_CxE * factors_CxE).astype(self.dtype)

    def pick(self, x: jax.Array, p: int) -> jax.Array:
        """Returns the lanes of head p of the pack, 0 elsewhere."""
        return x if self.heads == 1 else jnp.where(self._is_of(x, p), x, jnp.zeros((), x.dtype))

    def merge(self, of_heads: Iterable[jax.Array]) -> jax.Array:
        """Returns the lanes of each head from its own array."""
        merged, *more = of_heads
        for p, x in enumerate(more, 1):
            merged = jnp.where(self._is_of(x, p), x, merged)
        return merged

    def weigh(self, sides: Sequence[jax.Array]) -> Turns:
        """Returns, for each side, the products of keys j and sides i for j < i of each head.

        `sides` are [C, E] float32. The products are [C, C] float32, 0 elsewhere. A level of 4 tokens or less overwrites
        the blocks of 2 m tokens on the diagonal.
        """
        pairs = [[jnp.zeros(())] * self.heads for _ in sides]
        for m, factors in self._levels():
            first = Parted.of_rows(self.k * factors, m).first
            operand = self._make_operand(sides, factors, m)
            for p in range(self.heads):
                products = dot(self.pick(first, p).astype(self.dtype), operand, (1, 1))
                for found, product in zip(pairs, jnp.split(products, len(sides), axis=1), strict=True):
                    found[p] = self._put(product, found[p], m)
            yield
        return pairs

    def differentiate(self, sides: Sequence[jax.Array], dpairs: Sequence[Sequence[jax.Array]]) -> Turns:
        """Returns the `PairGradients` of the products of keys with `sides`, for each side and head."""
        dkeys, dsides, dlevels = jnp.zeros_like(self.k), [jnp.zeros_like(x) for x in sides], []
        for m, factors in self._levels():
            of, keys = Parted.of_rows(factors, m), Parted.of_rows(self.k * factors, m).first
            operand, key_operand = self._make_operand(sides, factors, m), keys.astype(self.dtype)
            ds = [[self._take(d, m) for d in of_heads] for of_heads in dpairs]
            dkey = self.merge(
                dot(jnp.concatenate(of_sides, axis=1).astype(self.dtype), operand, (1, 0))
                for of_sides in zip(*ds, strict=True)
            )
            dlevel, none = jnp.float32(0.0), jnp.zeros_like(dkey)
            for n, (x, of_heads) in enumerate(zip(sides, ds, strict=True)):
                later = [Parted.of_rows(d.T, m).second.astype(self.dtype) for d in of_heads]
                dside = self.merge(dot(d, key_operand, (1, 0)) for d in later)
                dlevel += dside * Parted.of_rows(x * factors, m).second
                dsides[n] += Parted(none, dside * of.second).in_order(m)
            dkeys += Parted(dkey * of.first, none).in_order(m)
            dlevels.append(Parted(dkey * keys, dlevel).in_order(m))
            yield
        return PairGradients(dkeys, dsides, dlevels)

    def add_own(self, own_1xC: jax.Array, pairs_CxC: jax.Array) -> jax.Array:
        """Puts the products of tokens with themselves, which no factor changes, on the diagonal of pairs."""
        return jnp.where(self._differing == 0, own_1xC, pairs_CxC)

    def take_own(self, dpairs_CxC: jax.Array) -> jax.Array:
        """Returns the gradients of the products of tokens with themselves, [1, C]."""
        return jnp.sum(jnp.where(self._differing == 0, dpairs_CxC, 0.0), axis=0, keepdims=True)

    @functools.cached_property
    def since(self) -> jax.Array:
        """The share of the state before the chunk that is left at each token, [C, E]."""
        return jnp.exp(self.sums.since)

    @functools.cached_property
    def until(self) -> jax.Array:
        """The share of each token that is left after the chunk, [C, E]."""
        return jnp.exp(self.sums.until)

    @functools.cached_property
    def whole(self) -> jax.Array:
        """The share of the state before the chunk that is left after the chunk, [1, E]."""
        return jnp.exp(self.sums.total[:1])

    def _levels(self) -> Iterable[tuple[int, jax.Array]]:
        return zip(_levels(self.k), self.factors, strict=True)

    def _make_operand(self, sides: Sequence[jax.Array], factors: jax.Array, m: int) -> jax.Array:
        """Returns all sides, one below the other; only second halves are faded where that is less work."""
        if m < SUBLANES:
            return jnp.concatenate([x * factors for x in sides]).astype(self.dtype)
        halves = [(Parted.of_rows(x, m), Parted.of_rows(x * factors, m)) for x in sides]
        return jnp.concatenate([Parted(raw.first, x.second).in_order(m) for raw, x in halves]).astype(self.dtype)

    def _put(self, product: jax.Array, pairs_CxC: jax.Array, m: int) -> jax.Array:
        """Returns the pairs with pairs of level m, of which `product` has the rows of the first halves."""
        if m >= SUBLANES:
            rows = Parted.of_rows(pairs_CxC, m)
            cut = zip(_cut(product, m), _cut(rows.first, m), strict=True)
            first = [jnp.where(self._is_in(at, m), new, old) for at, (new, old) in enumerate(cut)]
            return Parted(jnp.concatenate(first), rows.second).in_order(m)
        # A level overwrites what smaller levels left; the largest one leaves all other pairs 0.
        product = Parted(product, product).in_order(m)
        pairs = product if m == 1 else jnp.where(self._differing < m, pairs_CxC, product)
        return jnp.where(self._is_near, pairs, 0.0) if 2 * m == SUBLANES else pairs

    def _take(self, dpairs_CxC: jax.Array, m: int) -> jax.Array:
        """Returns the rows of the first halves, 0 but for pairs of level m."""
        rows = Parted.of_rows(dpairs_CxC, m).first
        if m >= SUBLANES:
            cut = enumerate(_cut(rows, m))
            return jnp.concatenate([jnp.where(self._is_in(at, m), x, 0.0) for at, x in cut])
        return jnp.where(self._is_level(m), rows, 0.0)

    def _is_in(self, at: int, m: int) -> jax.Array:
        """Returns True for the tokens of the second half of block `at`, [1, C]."""
        i = lax.broadcasted_iota(jnp.int32, (1, len(self.k)), 1)
        return (i >= (2 * at + 1) * m) & (i < (2 * at + 2) * m)

    def _is_of(self, x: jax.Array, p: int) -> jax.Array:
        """Returns True in the lanes of head p, [1, E]."""
        size = x.shape[1] // self.heads
        lane = lax.broadcasted_iota(jnp.int32, (1, x.shape[1]), 1)
        return (lane >= p * size) & (lane < (p + 1) * size)

    def _is_level(self, m: int) -> jax.Array:
        """Returns True for pairs of level m, 4 tokens or less, in the rows of the first halves."""
        row, i = (lax.broadcasted_iota(jnp.int32, (len(self.k) // 2, len(self.k)), axis) for axis in (0, 1))
        at = row % SUBLANES
        j = 2 * (row - at) + jnp.where((at & m) != 0, SUBLANES + at - m, at)
        return (j ^ i) // m == 1

    @functools.cached_property
    def _differing(self):
        """The bits in which the numbers of key j and query i differ, [C, C]."""
        j, i = (lax.broadcasted_iota(jnp.int32, (len(self.k),) * 2, axis) for axis in (0, 1))
        return j ^ i

    @functools.cached_property
    def _order(self):
        """True where j < i, [C, C]."""
        j, i = (lax.broadcasted_iota(jnp.int32, self._differing.shape, axis) for axis in (0, 1))
        return j < i

    @functools.cached_property
    def _is_near(self):
        """True where j < i in the same block of 8 tokens, [C, C]."""
        return self._order & (self._differing < SUBLANES)
