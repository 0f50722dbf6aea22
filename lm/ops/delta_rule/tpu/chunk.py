"""A chunk of one head, as the forward and the backward kernel both compute it.

Letters: C tokens, E key size, D value size, G queries of a key head; [j, i] of a pair is key j and query i. c holds the
running sums of the log factors, and S is the state before the chunk. The tokens add the columns of W to the state at
their keys, and read O:

     W = β (V - exp(c) S K) (I + M)⁻¹,          M_ji = β_i ⟨k_j, k_i⟩ exp(c_i - c_j) for j < i,
     O = exp(c) S Q + W P,                      P_ji = ⟨k_j, q_i⟩ exp(c_i - c_j) for j <= i.

Computations are generators. Code after a `yield` needs the product before it, and chunks of other heads take their turn
there: matrix units keep the order in which products are written.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from lm.ops.delta_rule.tpu.inverse import inverse
from lm.ops.delta_rule.unit import EPSILON
from lm.ops.tpu import dot
from lm.ops.tpu.decay import LogSums, columns, last, pairs, since_start, until_end
from lm.ops.tpu.order import Turns


class Vectors:
    """Queries or keys of a chunk, scaled to a given length.

    Attributes:
        x: the vectors as operands, [E, C].
    """

    def __init__(self, x_ExC: jax.Array, length: float | None):
        self.x, self._length = x_ExC, length
        if length is not None:
            wide = x_ExC.astype(jnp.float32)
            self._rate = length * lax.rsqrt(sum_rows(wide * wide) + EPSILON)
            self.x = (wide * self._rate).astype(x_ExC.dtype)

    def backwards(self, dx_ExC: jax.Array) -> jax.Array:
        """Returns the gradient of the vectors before scaling, from the gradient of `x`; float32."""
        if self._length is None:
            return dx_ExC
        x = self.x.astype(jnp.float32)
        along = sum_rows(dx_ExC * x) * self._length**-2
        return self._rate * (dx_ExC - along * x)


def sum_rows(x: jax.Array) -> jax.Array:
    """Returns the sums over all rows, [1, columns]."""
    return jnp.sum(x, axis=0, keepdims=True)


class Chunk:
    """The effect of a chunk's tokens on the state and on each other.

    Attributes:
        dtype: the type of the operands of products.
        k: keys, [E, C].
        beta: β, [1, C].
        state: S as an operand, [D, E].
        difference: V - exp(c) S K, [D, C] float32.
        inverse: (I + M)⁻¹ as an operand, [C, C].
        new: W, [D, C] float32.
    """

    def __init__(self, k_ExC, v_DxC, beta_1xC, sums_1xC: LogSums, state_DxE):
        self.dtype = v_DxC.dtype
        self.k, self.beta, self.state = k_ExC, beta_1xC, state_DxE.astype(self.dtype)
        self._v, self._sums = v_DxC, sums_1xC

    def solve(self, kept_CxC: jax.Array | None = None) -> Turns:
        """Makes `difference`, `inverse` and `new`; takes an inverse that was kept."""
        of_keys = dot(self.k, self.k, (0, 0))
        read = dot(self.state, self.k, (1, 0))
        yield
        self.products = of_keys * self.strictly
        self.read = self.since * read
        self.difference = self._v.astype(jnp.float32) - self.read
        if kept_CxC is None:
            solved = yield from inverse(self.products * self.beta, split=self.dtype != jnp.float32)
            kept_CxC = solved.astype(self.dtype)
        self.inverse = kept_CxC
        self.new = dot((self.beta * self.difference).astype(self.dtype), self.inverse, (1, 0))
        yield

    def weigh(self, of_query_CxC: jax.Array) -> jax.Array:
        """Makes P of the products of keys and queries, float32."""
        return of_query_CxC * self.within

    @functools.cached_property
    def within(self) -> jax.Array:
        """The factors exp(c_i - c_j), 0 where j > i."""
        factors = pairs(self._sums, columns(self._sums))
        return jnp.where(self._order[1], factors, 0.0)

    @functools.cached_property
    def strictly(self) -> jax.Array:
        """The factors of `within`, 0 where j = i too."""
        return jnp.where(self._order[0], self.within, 0.0)

    @functools.cached_property
    def since(self) -> jax.Array:
        """The share of the state before the chunk that is left at each token, exp(c), [1, C]."""
        return since_start(self._sums)

    @functools.cached_property
    def until(self) -> jax.Array:
        """The share of each token that is left after the chunk, [1, C]."""
        return until_end(self._sums)

    @functools.cached_property
    def whole(self) -> jax.Array:
        """The share of the state before the chunk that is left after the chunk, [1, 1]."""
        return since_start(self._sums.map(last))

    @functools.cached_property
    def _order(self):
        """Two masks: j < i, and j <= i."""
        size = self.k.shape[1]
        j, i = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
        return j < i, j <= i
