"""Decay in the TPU kernels: running sums of log factors inside a block, and the factors that they give.

c holds, for each token, the sum of the log factors from the first token of its block to itself, [1, T] float32. A
factor of 0 counts as exp(`RESET_LOG`), which is 0 in float32 as well, so that all differences are finite.

After 200 tokens of −100 a float32 number is precise to 1e-3. So kernels of float32 numbers keep the rest that rounding
has left. The difference of two c is exact where it is small (Sterbenz 1974, theorem 4.3.1), and the rests complete it.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lm.ops.decay import RESET, backwards, sum_in_pairs
from lm.ops.tpu import SUBLANES

RESET_LOG = -128.0


def arrange_log_decay(log_decay_BxLxK: jax.Array, length: int, heads: int) -> jax.Array:
    """Returns [B · heads, 1, length]: each of K heads repeated until there are `heads`, no decay in the padding."""
    batch, tokens, count = log_decay_BxLxK.shape
    g_BxHxL = jnp.repeat(log_decay_BxLxK.astype(jnp.float32).swapaxes(1, 2), heads // count, axis=1)
    g_BxHxL = jnp.pad(g_BxHxL, ((0, 0), (0, 0), (0, length - tokens)))
    return g_BxHxL.reshape(batch * heads, 1, length)


class LogSums(NamedTuple):
    """Sums of the logarithms of decay factors, in float32, from the first token of a block up to each token.

    The arrays belong to a whole call, or to one row or column of tokens.

    Attributes:
        c: the sums, rounded to float32.
        rest: the rest that rounding has left; None: no one keeps it.
    """

    c: jax.Array
    rest: jax.Array | None

    def map(self, function: Callable[[jax.Array], jax.Array]) -> 'LogSums':
        """Applies a function to both arrays."""
        return LogSums(function(self.c), None if self.rest is None else function(self.rest))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def block_sums(log_decay_Nx1xL: jax.Array, block: int, dtype: jnp.dtype) -> LogSums:
    """Computes the running sums for kernels whose numbers have a type; gradients go through `c` alone.

    Sums of many strong factors are in the thousands, where float32 is precise to 1e-4. Kernels of float32 numbers keep
    the rest. In bfloat16 each weight is rounded to 2e-3 anyway. A reset's own factor has the gradient 0.
    """
    g = _in_blocks(jnp.maximum(log_decay_Nx1xL, RESET_LOG), block)
    if dtype != jnp.float32:
        return LogSums(jnp.cumsum(g, axis=-1).reshape(log_decay_Nx1xL.shape), None)
    sums = sum_in_pairs(g, jnp.zeros(g.shape, bool))
    return LogSums(*sums).map(lambda x: x.reshape(log_decay_Nx1xL.shape))


def _in_blocks(x_Nx1xL: jax.Array, block: int) -> jax.Array:
    return x_Nx1xL.reshape(x_Nx1xL.shape[0], -1, block)


def _backwards(block, dtype, g_Nx1xL, dsums):
    d = backwards(_in_blocks(dsums.c, block), _in_blocks(g_Nx1xL < RESET, block))
    return (d.reshape(g_Nx1xL.shape),)


block_sums.defvjp(lambda g, block, dtype: (block_sums(g, block, dtype), g), _backwards)


def column(x_1xT: jax.Array) -> jax.Array:
    """Returns [T, 1]."""
    return jnp.broadcast_to(x_1xT, (SUBLANES, x_1xT.shape[1])).T[:, :1]


def columns(sums_1xT: LogSums) -> LogSums:
    """Returns [T, 1] of each array; one transposition makes both columns."""
    c, rest = sums_1xT
    if rest is None:
        return sums_1xT.map(column)
    row = lax.broadcasted_iota(jnp.int32, (SUBLANES, c.shape[1]), 0)
    both_Tx8 = jnp.where(row == 0, c, rest).T
    return LogSums(both_Tx8[:, :1], both_Tx8[:, 1:2])


def pairs(queries: LogSums, keys: LogSums) -> jax.Array:
    """Computes the factors of keys for queries, one of them a row and the other a column.

    Where the key comes later the factors mean nothing, and may be infinite where there is a rest.
    """
    difference = queries.c - keys.c
    if queries.rest is None or keys.rest is None:
        return jnp.exp(jnp.minimum(difference, 0.0))
    # The nearest float32 numbers of two sums that are equal but for rounding may be in either order.
    return jnp.exp(difference + (queries.rest - keys.rest))


def since_start(sums: LogSums) -> jax.Array:
    """Computes the factors from the start of the block to each token."""
    return jnp.exp(sums.c if sums.rest is None else sums.c + sums.rest)


def until_end(sums_1xT: LogSums) -> jax.Array:
    """Computes the factors from each token to the end of the block, [1, T]."""
    c, rest = sums_1xT
    difference = last(c) - c
    return jnp.exp(difference if rest is None else difference + (last(rest) - rest))


def last(x_1xT: jax.Array) -> jax.Array:
    """Returns the number of the last token, [1, 1]."""
    return x_1xT[:, -1:]


def multiply_tokens(x_FxT: jax.Array, factors_1xT: jax.Array | None) -> jax.Array:
    """Multiplies each token of x by its factor, in the type of x; None: returns x."""
    return x_FxT if factors_1xT is None else (x_FxT.astype(jnp.float32) * factors_1xT).astype(x_FxT.dtype)


def decay_sums(sums: jax.Array, factor: jax.Array | None) -> jax.Array:
    """Multiplies sums over earlier keys by factors of decay, [1, 1] or [1, T]; None: 1."""
    return sums if factor is None else sums * factor
