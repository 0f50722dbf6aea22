"""Decay in the TPU kernels: running sums of log factors inside a block, and the factors that they give.

c holds, for each token, the sum of the log factors from the first token of its block to itself, [1, T] float32. A
factor of 0 counts as exp(`RESET_LOG`), which is 0 in float32 as well, so that all differences are finite.
"""

import functools

import jax
import jax.numpy as jnp

from lm.ops.decay import RESET, backwards

RESET_LOG = -128.0


def arrange_log_decay(log_decay_BxLxK: jax.Array, length: int, heads: int) -> jax.Array:
    """Returns [B · heads, 1, length]: each of K heads repeated until there are `heads`, no decay in the padding."""
    batch, tokens, count = log_decay_BxLxK.shape
    g_BxHxL = jnp.repeat(log_decay_BxLxK.astype(jnp.float32).swapaxes(1, 2), heads // count, axis=1)
    g_BxHxL = jnp.pad(g_BxHxL, ((0, 0), (0, 0), (0, length - tokens)))
    return g_BxHxL.reshape(batch * heads, 1, length)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def block_sums(log_decay_Nx1xL: jax.Array, block: int) -> jax.Array:
    """Computes c. A reset's own factor has the gradient 0."""
    g = _in_blocks(jnp.maximum(log_decay_Nx1xL, RESET_LOG), block)
    return jnp.cumsum(g, axis=-1).reshape(log_decay_Nx1xL.shape)


def _in_blocks(x_Nx1xL: jax.Array, block: int) -> jax.Array:
    return x_Nx1xL.reshape(x_Nx1xL.shape[0], -1, block)


def _backwards(block, g_Nx1xL, dc_Nx1xL):
    d = backwards(_in_blocks(dc_Nx1xL, block), _in_blocks(g_Nx1xL < RESET, block))
    return (d.reshape(dc_Nx1xL.shape),)


block_sums.defvjp(lambda g, block: (block_sums(g, block), g), _backwards)


def column(c_1xT: jax.Array) -> jax.Array:
    """Returns [T, 1]."""
    return jnp.broadcast_to(c_1xT, (8, c_1xT.shape[1])).T[:, :1]


def pairs(c_queries: jax.Array, c_keys: jax.Array) -> jax.Array:
    """Computes the factors of keys for queries, one of them a row and the other a column.

    Where the key comes later the factors mean nothing, but are finite.
    """
    return jnp.exp(jnp.minimum(c_queries - c_keys, 0.0))


def last(c_1xT: jax.Array) -> jax.Array:
    """Returns the sum of the last token, [1, 1]."""
    return c_1xT[:, -1:]


def multiply_tokens(x_FxT: jax.Array, factors_1xT: jax.Array | None) -> jax.Array:
    """Multiplies each token of x by its factor, in the type of x; None: returns x."""
    return x_FxT if factors_1xT is None else (x_FxT.astype(jnp.float32) * factors_1xT).astype(x_FxT.dtype)


def decay_sums(sums: jax.Array, factor: jax.Array | None) -> jax.Array:
    """Multiplies sums over earlier keys by factors of decay, [1, 1] or [1, T]; None: 1."""
    return sums if factor is None else sums * factor
