"""Products of decayed pairs of one chunk in Hopper kernels, where key channels have factors of their own.

Pairs are as in `lm.ops.channel_decay`: at level m, tokens of a second half of m tokens meet tokens of the first half in
the middle. F_m are the logs of the factors from or to the middle:

    w_ij = Σ_m Σ_e (q_i exp(F_m))_e (k_j exp(F_m))_e          each pair j < i belongs to one level m

F_m is a product of the logs with a matrix of zeros and ones: a sum of numbers of one sign, at most 0. No difference is
taken, so nothing overflows and nothing cancels. Products take logs as two bfloat16 numbers, to 16 bits.

C tokens of a chunk, E channels, both TILE.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.dots import in_parts
from lm.ops.gpu import TILE, load_matrix, matrix, number_entries, product, release, sum_products, widen

Carry = TypeVar('Carry')

LEVELS = TILE.bit_length() - 1
"""The number of levels: m = 1, 2, 4, … of a chunk."""
LEAST = -128.0
"""Logs below it count as it: exp of both is 0 in float32, and products take no infinite number."""


def _differ(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the bits in which numbers differ; the first one is m of the level where two tokens meet."""
    return a + b - 2 * (a & b)


def loop_over_levels(step: Callable[[jax.Array, Carry], Carry], carry: Carry) -> Carry:
    """Calls carry = step(m, carry) for each level.

    It is a loop of the program: the compiler would keep the selections of unrolled levels for their next use, in
    registers that there are not.
    """
    return lax.fori_loop(0, LEVELS, lambda n, carry: step(lax.shift_left(jnp.int32(1), n), carry), carry)


class Selections:
    """Matrices of zeros and ones, [C, C]: which tokens' logs (the columns) are in the sums of which tokens (the rows).

    With `transposed`, rows and columns change places, as gradients need it.
    """

    def __init__(self, transposed: bool = False):
        row, column = number_entries()
        self.token, self.other = (column, row) if transposed else (row, column)

    def since(self) -> jax.Array:
        """Returns the tokens from the start of the chunk to each token."""
        return self._select(self.other <= self.token)

    def until(self) -> jax.Array:
        """Returns the tokens after each token."""
        return self._select(self.other > self.token)

    def whole(self) -> jax.Array:
        """Returns all tokens."""
        return self._select(self.other >= 0)

    def level(self, m: jax.Array) -> jax.Array:
        """Returns the tokens between each token and the middle of its block of 2 m."""
        ahead = self.token - self.other
        between = jnp.where((self.token & m) != 0, ahead, -1 - ahead)
        inside = jnp.where(_differ(self.token, self.other) < m, between, -1)
        return self._select(inside >= 0)

    def _select(self, where: jax.Array) -> jax.Array:
        return jnp.where(where, 1.0, 0.0).astype(jnp.bfloat16)


def add_selected(selection: jax.Array, parts: list) -> jax.Array:
    """Computes the sums of the selected tokens' numbers, float32 [C, E]; `parts` are in shared memory."""
    return sum_products([(selection, part) for part in parts])[0]


def make_factors(selection: jax.Array, logs: list) -> jax.Array:
    """Computes exp of the sums of the selected tokens' logs, float32 [C, E]."""
    return jnp.exp(add_selected(selection, logs))


def fade(x_CxE, factors: jax.Array) -> jax.Array:
    """Multiplies vectors in shared memory by factors; the result is an operand."""
    return (load_matrix(x_CxE).astype(jnp.float32) * factors).astype(jnp.bfloat16)


def take_level(pairs: jax.Array, m: jax.Array, other: jax.Array | float = 0.0) -> jax.Array:
    """Returns pairs [C, C] of level m, and `other` elsewhere; queries are on the rows."""
    row, column = number_entries()
    differ = _differ(row, column)
    if not isinstance(other, jax.Array):
        other = jnp.full_like(pairs, other)
    later = jnp.where(column < row, pairs, other)
    return jnp.where(differ >= m, jnp.where(differ < 2 * m, later, other), other)


def take_own(pairs: jax.Array) -> jax.Array:
    """Returns the diagonal of pairs [C, C], and 0 elsewhere."""
    row, column = number_entries()
    return jnp.where(row == column, pairs, 0.0)


def weigh(q_CxE, k_CxE, logs: list, faded_CxE) -> jax.Array:
    """Computes the weights of pairs j <= i, float32 [C, C] and 0 elsewhere; queries are on the rows.

    Keys times factors are placed in `faded_CxE`. No factor changes the weights of pairs j = i.
    """
    return weigh_earlier(q_CxE, k_CxE, logs, faded_CxE, take_own(product(q_CxE, k_CxE.transpose((1, 0)))))


def weigh_earlier(q_CxE, k_CxE, logs: list, faded_CxE, other: jax.Array) -> jax.Array:
    """Computes the weights of pairs j < i, float32 [C, C], and takes `other` elsewhere."""
    select = Selections()

    def weigh_level(m: jax.Array, pairs: jax.Array) -> jax.Array:
        factors = make_factors(select.level(m), logs)
        release()
        faded_CxE[...] = fade(k_CxE, factors)
        plgpu.commit_smem()
        found = product(fade(q_CxE, factors), faded_CxE.transpose((1, 0)))
        return take_level(found, m, pairs)

    return loop_over_levels(weigh_level, other)


class PairGradientMemory(NamedTuple):
    """Shared memory of the gradients of pairs.

    Attributes:
        keys: where keys times factors are placed, [C, E].
        queries: where queries times factors are placed, [C, E].
        weights: where weights of pairs, or their gradients, are placed, [C, C].
        dlog: the gradients of the logs, float32 [C, E]. Registers would not hold them, too.
    """

    keys: Any
    queries: Any
    weights: Any
    dlog: Any

    @classmethod
    def allocate(cls) -> 'PairGradientMemory':
        tile = matrix(TILE, TILE)
        return cls(tile, tile, tile, matrix(TILE, TILE, dtype=jnp.float32))


def place_halves(value: jax.Array, memory: PairGradientMemory) -> list:
    """Places numbers in shared memory as two operands."""
    release()
    halves = [memory.queries, memory.keys]
    for place, half in zip(halves, in_parts(value, 2), strict=True):
        place[...] = half
    plgpu.commit_smem()
    return halves


def add_log_gradients(turned_selection: jax.Array, value: jax.Array, memory: PairGradientMemory) -> None:
    """Adds the gradients of the logs of which `value` is the gradient of sums; the selection is transposed."""
    halves = place_halves(value, memory)
    memory.dlog[...] = load_matrix(memory.dlog) + add_selected(turned_selection, halves)


def differentiate_pairs(
    q_CxE, k_CxE, logs: list, dpairs_CxC, memory: PairGradientMemory, start: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Adds the gradients of queries and of keys, float32 [C, E], to `start`, and of the logs to `memory.dlog`.

    `dpairs_CxC` are the gradients of the weights of pairs j < i, in shared memory; other entries do not count.
    """
    select, turned = Selections(), Selections(transposed=True)

    def differentiate_level(m: jax.Array, found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        dq, dk = found
        factors = make_factors(select.level(m), logs)
        release()
        memory.weights[...] = take_level(load_matrix(dpairs_CxC), m)
        memory.queries[...], memory.keys[...] = fade(q_CxE, factors), fade(k_CxE, factors)
        plgpu.commit_smem()
        # One after the other: registers do not hold both.
        dqueries = product(memory.weights, memory.keys) * factors
        dlog = dqueries * widen(q_CxE)
        dkeys = product(memory.weights.transpose((1, 0)), memory.queries) * factors
        add_log_gradients(turned.level(m), dlog + dkeys * widen(k_CxE), memory)
        return dq + dqueries, dk + dkeys

    return loop_over_levels(differentiate_level, start)
