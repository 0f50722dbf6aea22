"""A chunk of one head whose key channels have factors of their own, as the forward and the backward kernel compute it.

Formulas and letters are as in `chunk`, products of decayed pairs as in `lm.ops.channel_decay`. At level m, tokens of a
second half of m tokens meet tokens of the first half in the middle. F_m are the logs of the factors from or to the
middle, [E, C].

    M_ji = β_i Σ_m Σ_e (k_j exp(F_m))_e (k_i exp(F_m))_e          each pair j < i belongs to one level m
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from lm.ops.delta_rule.tpu.chunk import Vectors, sum_rows
from lm.ops.delta_rule.tpu.inverse import inverse
from lm.ops.delta_rule.tpu.plan import DeltaPlan
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
    """The gradients that pairs give to keys, to the other side, and to the F_m."""

    keys: jax.Array
    others: list[jax.Array]
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
    return jnp.where(_is_second(x_ExC, m), _roll(x_ExC, m), _roll(x_ExC, size - m))


def _roll(x: jax.Array, by: int) -> jax.Array:
    return pltpu.roll(x, by, 1)


class ChannelChunk:
    """The effect of a chunk's tokens on the state and on each other.

    Attributes:
        dtype: the type of the operands of products.
        k: keys, [E, C].
        beta: β, [1, C].
        state: S as an operand, [D, E].
        sums: the sums of log factors.
        k_since, k_until: keys times the factors since the start of the chunk, and until its end; operands.
        products: the sums of M before β, [C, C].
        difference: V - S k_since, [D, C] float32.
        inverse: (I + M)⁻¹ as an operand, [C, C].
        new: W, [D, C] float32.
    """

    def __init__(self, k_ExC, v_DxC, beta_1xC, log_ExC, state_DxE):
        self.dtype = v_DxC.dtype
        self.k, self.beta, self.state, self._v = k_ExC, beta_1xC, state_DxE.astype(self.dtype), v_DxC
        self.sums = sum_levels(log_ExC)
        self.factors = [jnp.exp(level) for level in self.sums.levels]
        self.k_since, self.k_until = self.fade(k_ExC, self.since), self.fade(k_ExC, self.until)

    def fade(self, x_ExC: jax.Array, factors_ExC: jax.Array) -> jax.Array:
        """Multiplies vectors by factors; the result is an operand."""
        return (x_ExC.astype(jnp.float32) * factors_ExC).astype(self.dtype)

    def solve(self, queries: Sequence[jax.Array]) -> Turns:
        """Makes `products`, `difference`, `inverse` and `new`; returns P of each of the queries, float32."""
        read = dot(self.state, self.k_since, (1, 0))
        products, *weights = yield from self._weigh([self.k, *queries])
        self.products = jnp.where(self._order, products, 0.0)
        self.difference = self._v.astype(jnp.float32) - read
        solved = yield from inverse(self.products * self.beta, split=self.dtype != jnp.float32)
        self.inverse = solved.astype(self.dtype)
        self.new = dot((self.beta * self.difference).astype(self.dtype), self.inverse, (1, 0))
        yield
        return [self._add_own(x, weight) for x, weight in zip(queries, weights, strict=True)]

    def _weigh(self, sides: Sequence[jax.Array]) -> Turns:
        """Returns the products of keys j and sides i for j < i; the others mean nothing.

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
        return pairs

    def _descending(self) -> list[tuple[int, jax.Array]]:
        """Returns the levels and their factors, the largest level first."""
        return list(zip(_levels(self.k), self.factors, strict=True))[::-1]

    def differentiate(self, sides: Sequence[jax.Array], dpairs: Sequence[jax.Array]) -> Turns:
        """Returns the `PairGradients` of the products of keys with `sides`; the first side is the keys themselves."""
        dkeys, dsides = jnp.zeros(self.k.shape, jnp.float32), [jnp.zeros(x.shape, jnp.float32) for x in sides]
        dlevels, rest = [], [jnp.where(self._order, dpair, 0.0) for dpair in dpairs]
        for m, factors in self._descending():
            keys, dkey, dlevel, is_here = self.fade(self.k, factors), 0.0, 0.0, self._differing >= m
            for n, x in enumerate(sides):
                other = keys if x is self.k else self.fade(x, factors)
                d = jnp.where(is_here, rest[n], 0.0).astype(self.dtype)
                rest[n] = jnp.where(is_here, 0.0, rest[n])
                dother = dot(keys, d, (1, 0))
                dkey += dot(other, d, (1, 1))
                dsides[n] += dother * factors
                dlevel += dother * other.astype(jnp.float32)
            dkeys += cast(jax.Array, dkey) * factors
            dlevels.append(dlevel + dkey * keys.astype(jnp.float32))
            yield
        return PairGradients(dkeys, dsides, dlevels[::-1])

    def _add_own(self, x_ExC: jax.Array, pairs_CxC: jax.Array) -> jax.Array:
        own_1xC = sum_rows(x_ExC.astype(jnp.float32) * self.k.astype(jnp.float32))
        return jnp.where(self._order, pairs_CxC, jnp.where(self._differing == 0, own_1xC, 0.0))

    def take_own(self, dweights_CxC: jax.Array) -> jax.Array:
        """Returns the gradients of the products of tokens with themselves, [1, C]."""
        return sum_rows(jnp.where(self._differing == 0, dweights_CxC, 0.0))

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
    def _differing(self):
        """The bits in which the numbers of key j and query i differ, [C, C]."""
        size = self.k.shape[1]
        j, i = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
        return j ^ i

    @functools.cached_property
    def _order(self):
        """True where j < i, [C, C]."""
        j, i = (lax.broadcasted_iota(jnp.int32, self._differing.shape, axis) for axis in (0, 1))
        return j < i


def compute_head(plan: DeltaPlan, tokens: Any, state: Any, results: Any, n: int) -> Turns:
    """Computes the outputs of key head n and the state after the chunk; arguments as in the forward kernel."""
    q, k, v, beta, logs = tokens
    chunk = ChannelChunk(Vectors(k[n], plan.key_length).x, v[n], beta[n], logs[n], state[n])
    if results.states_NxTxDxE is not None:
        results.states_NxTxDxE[n, 0] = chunk.state
    queries = range(n * plan.groups, (n + 1) * plan.groups)
    vectors = [Vectors(q[m], plan.query_length).x for m in queries]
    reads = [dot(chunk.state, chunk.fade(x, chunk.since), (1, 0)) for x in vectors]
    weights = yield from chunk.solve(vectors)
    new = chunk.new.astype(chunk.dtype)
    for m, weight, read in zip(queries, weights, reads, strict=True):
        results.o_MxDxL[m] = (read + dot(new, weight.astype(chunk.dtype), (1, 0))).astype(v.dtype)
    state[n] = chunk.whole * state[n] + dot(new, chunk.k_until, (1, 1))


def differentiate_head(plan: DeltaPlan, refs: Any, n: int) -> Turns:
    """Computes the gradients of key head n and its queries; arguments as in the backward kernel."""
    q, k, v, beta, logs = refs.tokens
    dq, dk, dv, dbeta, dlogs = cast(Any, refs.gradients)
    do, dstate = refs.do, refs.dstate
    keys = Vectors(k[n], plan.key_length)
    chunk = ChannelChunk(keys.x, v[n], beta[n], logs[n], refs.states[n, 0])
    dtype = chunk.dtype
    queries = range(n * plan.groups, (n + 1) * plan.groups)
    vectors = [Vectors(q[m], plan.query_length) for m in queries]
    dstate_operand = dstate[n].astype(dtype)
    dnew = dot(dstate_operand, chunk.k_until, (1, 0))
    weights = yield from chunk.solve([each.x for each in vectors])
    # First dW, then dR, dM and dP.
    new = chunk.new.astype(dtype)
    for m, weight in zip(queries, weights, strict=True):
        dnew += dot(do[m], weight.astype(dtype), (1, 1))
    yield
    dgiven = dot(dnew.astype(dtype), chunk.inverse, (1, 1))
    yield
    dsystem = -dot(new, dgiven.astype(dtype), (0, 0))
    dweights = [dot(new, do[m], (0, 0)) for m in queries]
    # Through R: the gradients of v and β, and of S and k through the difference.
    ddifference = chunk.beta * dgiven
    dv[n] = ddifference.astype(dtype)
    dread = (-ddifference).astype(dtype)
    yield
    dbeta[n] = sum_rows(dgiven * chunk.difference) + sum_rows(dsystem * chunk.products)
    dk_since = dot(chunk.state, dread, (0, 0))
    dk_until = dot(dstate_operand, new, (0, 0))
    dstates = chunk.whole * dstate[n] + dot(dread, chunk.k_since, (1, 1))
    dpairs = [dsystem * chunk.beta, *dweights]
    gradients = yield from chunk.differentiate([chunk.k, *(each.x for each in vectors)], dpairs)
    dkeys = gradients.keys + gradients.others[0] + dk_since * chunk.since + dk_until * chunk.until
    dsince = dk_since * chunk.k_since.astype(jnp.float32)
    # Through the queries' reads, and through the products of tokens with themselves.
    for m, each, dweight, dother in zip(queries, vectors, dweights, gradients.others[1:], strict=True):
        of_since, x = dot(chunk.state, do[m], (0, 0)), chunk.fade(each.x, chunk.since)
        down = chunk.take_own(dweight)
        dquery = dother + of_since * chunk.since + down * chunk.k.astype(jnp.float32)
        dq[m] = each.backwards(dquery).astype(dtype)
        dkeys += down * each.x.astype(jnp.float32)
        dsince += of_since * x.astype(jnp.float32)
        dstates += dot(do[m], x, (1, 1))
    dk[n] = keys.backwards(dkeys).astype(dtype)
    # The factors of the state: the sum of all tokens stands in the last lane of `since`.
    kept = dstate[n] * chunk.state.astype(jnp.float32) * chunk.whole
    is_last = lax.broadcasted_iota(jnp.int32, (kept.shape[0], dsince.shape[1]), 1) == dsince.shape[1] - 1
    dsince += dot(kept.astype(dtype), is_last.astype(dtype), (0, 0))
    duntil = dk_until * chunk.k_until.astype(jnp.float32)
    sums = LevelSums(gradients.levels, dsince, duntil, jnp.zeros_like(dsince))
    dlogs[n] = differentiate_sums(sums)
    dstate[n] = dstates
