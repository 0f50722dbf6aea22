"""Products of decayed pairs of one chunk in TPU kernels, where key channels have factors of their own.

Products are as in `lm.ops.channel_decay`: at level m, tokens of a second half of m tokens meet tokens of the first half
in the middle. F_m are the logs of the factors from or to the middle. C tokens are on the lanes, E channels on the rows.

    w_ji = Σ_m Σ_e (k_j exp(F_m))_e (x_i exp(F_m))_e          each pair j < i belongs to one level m
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from lm.ops.tpu import dot
from lm.ops.tpu.order import Turns


class LevelSums(NamedTuple):
    """The F_m of all levels m = 1, 2, 4, …, and sums over the whole chunk; all [E, C].

    Attributes:
        levels: F_m.
        since: from the start of the chunk to each token.
        until: from after each token to the end.
        total: the sum of all tokens, in all lanes.
    """

    levels: list[jax.Array]
    since: jax.Array
    until: jax.Array
    total: jax.Array


class PairGradients(NamedTuple):
    """The gradients that pairs give to keys, to each side, and to the F_m."""

    keys: jax.Array
    sides: list[jax.Array]
    levels: list[jax.Array]


def sum_levels(log_ExC: jax.Array) -> LevelSums:
    """Sums the log factors; sums over a sibling come by rotations of lanes."""
    since, until, total, levels = log_ExC, jnp.zeros_like(log_ExC), log_ExC, []
    for m in _levels(log_ExC):
        second = _is_second(log_ExC, m)
        levels.append(jnp.where(second, since, until))
        sibling = _exchange(total, m)
        since += jnp.where(second, sibling, 0.0)
        until += jnp.where(second, 0.0, sibling)
        total += sibling
    return LevelSums(levels, since, until, total)


def differentiate_sums(gradients: LevelSums) -> jax.Array:
    """Returns the gradient of the log factors; `total` has a gradient in the lanes that were read."""
    dlevels, dsince, duntil, dtotal = gradients
    for m, dlevel in reversed(list(zip(_levels(dsince), dlevels, strict=True))):
        second = _is_second(dsince, m)
        dtotal += _exchange(jnp.where(second, dsince, duntil) + dtotal, m)
        dsince += jnp.where(second, dlevel, 0.0)
        duntil += jnp.where(second, 0.0, dlevel)
    return dsince + dtotal


def _levels(x_ExC: jax.Array) -> list[int]:
    return [1 << n for n in range(x_ExC.shape[1].bit_length() - 1)]


def _is_second(x_ExC: jax.Array, m: int) -> jax.Array:
    return (lax.broadcasted_iota(jnp.int32, (1, x_ExC.shape[1]), 1) & m) != 0


def _exchange(x_ExC: jax.Array, m: int) -> jax.Array:
    """Returns the entries of the other half of each token's block of 2 m."""
    size = x_ExC.shape[1]
    if 2 * m == size:
        return _roll(x_ExC, m)
    return jnp.where(_is_second(x_ExC, m), _roll(x_ExC, m), _roll(x_ExC, -m))


def _roll(x: jax.Array, by: int) -> jax.Array:
    return pltpu.roll(x, by % x.shape[1], 1)


class ChannelPairs:
    """The keys of a chunk of one head, and the factors by which its tokens fade the state.

    Attributes:
        dtype: the type of the operands of products.
        k: keys, [E, C].
        sums: the sums of log factors.
        factors: exp(F_m) of all levels.
    """

    def __init__(self, k_ExC: jax.Array, log_ExC: jax.Array):
        self.dtype, self.k = k_ExC.dtype, k_ExC
        self.sums = sum_levels(log_ExC)
        self.factors = [jnp.exp(level) for level in self.sums.levels]

    def fade(self, x_ExC: jax.Array, factors_ExC: jax.Array) -> jax.Array:
        """Multiplies vectors by factors; the result is an operand."""
        return (x_ExC.astype(jnp.float32) * factors_ExC).astype(self.dtype)

    def weigh(self, sides: Sequence[jax.Array]) -> Turns:
        """Returns the products of keys j and sides i for j < i, 0 elsewhere; float32.

        A level overwrites the blocks of 2 m tokens on the diagonal. Smaller levels then overwrite what does not belong
        to it.
        """
        pairs: list[Any] = [None] * len(sides)
        for m, factors in self._descending():
            keys, is_inside = self.fade(self.k, factors), self._differing < 2 * m
            for n, x in enumerate(sides):
                product = dot(keys, keys if x is self.k else self.fade(x, factors), (0, 0))
                pairs[n] = product if pairs[n] is None else jnp.where(is_inside, product, pairs[n])
            yield
        return [jnp.where(self._order, pair, 0.0) for pair in pairs]

    def differentiate(self, sides: Sequence[jax.Array], dpairs: Sequence[jax.Array]) -> Turns:
        """Returns the `PairGradients` of the products of keys with `sides`."""
        dkeys, dsides = jnp.zeros(self.k.shape, jnp.float32), [jnp.zeros(x.shape, jnp.float32) for x in sides]
        dlevels, rest = [], [jnp.where(self._order, dpair, 0.0) for dpair in dpairs]
        for m, factors in self._descending():
            keys, dkey, dlevel, is_here = self.fade(self.k, factors), 0.0, 0.0, self._differing >= m
            for n, x in enumerate(sides):
                side = keys if x is self.k else self.fade(x, factors)
                d = jnp.where(is_here, rest[n], 0.0).astype(self.dtype)
                rest[n] = jnp.where(is_here, 0.0, rest[n])
                dside = dot(keys, d, (1, 0))
                dkey += dot(side, d, (1, 1))
                dsides[n] += dside * factors
                dlevel += dside * side.astype(jnp.float32)
            dkeys += cast(jax.Array, dkey) * factors
            dlevels.append(dlevel + dkey * keys.astype(jnp.float32))
            yield
        return PairGradients(dkeys, dsides, dlevels[::-1])

    def add_own(self, x_ExC: jax.Array, pairs_CxC: jax.Array) -> jax.Array:
        """Adds the products of tokens with themselves, which no factor changes, to the pairs of a side."""
        own_1xC = jnp.sum(x_ExC.astype(jnp.float32) * self.k.astype(jnp.float32), axis=0, keepdims=True)
        return jnp.where(self._differing == 0, own_1xC, pairs_CxC)

    def take_own(self, dpairs_CxC: jax.Array) -> jax.Array:
        """Returns the gradients of the products of tokens with themselves, [1, C]."""
        return jnp.sum(jnp.where(self._differing == 0, dpairs_CxC, 0.0), axis=0, keepdims=True)

    def differentiate_whole(self, kept_DxE: jax.Array) -> jax.Array:
        """Returns the gradient of `sums.since` through `whole`, whose logs stand in its last lane.

        Args:
            kept_DxE: the gradient of each number of the state after the chunk, times what is left of the number before.
        """
        is_last = lax.broadcasted_iota(jnp.int32, (kept_DxE.shape[0], self.k.shape[1]), 1) == self.k.shape[1] - 1
        return dot(kept_DxE.astype(self.dtype), is_last.astype(self.dtype), (0, 0))

    @functools.cached_property
    def since(self) -> jax.Array:
        """The share of the state before the chunk that is left at each token, [E, C]."""
        return jnp.exp(self.sums.since)

    @functools.cached_property
    def until(self) -> jax.Array:
        """The share of each token that is left after the chunk, [E, C]."""
        return jnp.exp(self.sums.until)

    @functools.cached_property
    def whole(self) -> jax.Array:
        """The share of the state before the chunk that is left after the chunk, [1, E]."""
        return jnp.exp(self.sums.total).T[:1]

    @functools.cached_property
    def _order(self):
        """True where j < i, [C, C]."""
        j, i = (lax.broadcasted_iota(jnp.int32, self._differing.shape, axis) for axis in (0, 1))
        return j < i

    def _descending(self) -> list[tuple[int, jax.Array]]:
        """Returns the levels and their factors, the largest level first."""
        return list(zip(_levels(self.k), self.factors, strict=True))[::-1]

    @functools.cached_property
    def _differing(self):
        """The bits in which the numbers of key j and query i differ, [C, C]."""
        size = self.k.shape[1]
        j, i = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
        return j ^ i
