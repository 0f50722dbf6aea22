"""Factors of decay that differ between the channels of a key: products of decayed pairs inside a chunk.

    weight of key j for query i < C     w_ij = Σ_e q_ie k_je Π_{j < m ≤ i} a_me          j < i

Running sums G of log a cannot serve both sides: exp(-G_j) overflows where a is small. Instead the chunk is halved again
and again. A query in a second half and a key in the first half meet at the middle of their block. The query is
multiplied by the factors from the middle to itself, and the key by the factors from itself to the middle. Both products
are at most 1, and both logs are sums of numbers of one sign. So nothing overflows and nothing cancels. A factor of 0
(log -inf) needs no special case, in gradients neither.

A stands for any leading axes, G queries share a key, C tokens per chunk, E channels.
"""

import jax
import jax.numpy as jnp
import numpy as np

from lm.ops.dots import dot

BASE = 16
"""Blocks of so many tokens are one product per halving, with a mask: smaller products would be slower."""


Halves = tuple[jax.Array, jax.Array]
"""Sums of log factors in blocks of m tokens, flat [A, C, E]: from the start of the token's block to the token, with its
own; and from after the token to the end of its block."""


def _join(halves: Halves, m: int) -> Halves:
    """Returns the sums in blocks of 2 m tokens."""
    shape = halves[0].shape
    since, until = (_cut(x, m) for x in halves)
    totals = since[..., -1:, :]
    first, second = totals[..., :1, :, :], totals[..., 1:, :, :]
    since = jnp.concatenate([since[..., :1, :, :], since[..., 1:, :, :] + first], axis=-3)
    until = jnp.concatenate([until[..., :1, :, :] + second, until[..., 1:, :, :]], axis=-3)
    return since.reshape(shape), until.reshape(shape)


def _cut(x_AxCxE: jax.Array, m: int) -> jax.Array:
    """Returns [A, C / 2m, 2, m, E]."""
    *lead, length, size = x_AxCxE.shape
    return x_AxCxE.reshape(*lead, length // (2 * m), 2, m, size)


def round_up(length: int) -> int:
    """Returns the next power of two: the tokens of a chunk."""
    return 1 << (length - 1).bit_length()


def weigh(
    q_AxGxCxE: jax.Array, k_AxCxE: jax.Array, log_decay_AxCxE: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Computes the weights of a chunk of a power of two tokens.

    Args:
        q_AxGxCxE: queries; products round them, and keys, to the types that they come in.
        k_AxCxE: keys.
        log_decay_AxCxE: logs of the factors, at most 0; -inf where nothing is left. Gradients flow to it.

    Returns:
        (w_ij for j < i, else 0, float32 [A, G, C, C], and three products of factors: from the start of the chunk to
        each token and from after each token to the end, [A, C, E], and from the start to the end, [A, E]).
    """
    log = log_decay_AxCxE.astype(jnp.float32)
    *lead, groups, length, size = q_AxGxCxE.shape
    q, k = q_AxGxCxE.reshape(-1, groups, length, size), k_AxCxE.reshape(-1, length, size)
    halves = (log.reshape(k.shape), jnp.zeros(k.shape, jnp.float32))
    base, m = min(length, BASE), 1
    pairs = jnp.zeros((q.shape[0], groups, length // base, base, base), jnp.float32)
    while m < base:
        pairs += _weigh_in_base(q, k, halves, m, base)
        halves, m = _join(halves, m), 2 * m
    while m < length:
        across = _weigh_across(q, k, halves, m)
        above = jnp.concatenate([pairs[:, :, ::2], jnp.zeros_like(across)], axis=-1)
        pairs = jnp.concatenate([above, jnp.concatenate([across, pairs[:, :, 1::2]], axis=-1)], axis=-2)
        halves, m = _join(halves, m), 2 * m
    since, until = (jnp.exp(x).reshape(k_AxCxE.shape) for x in halves)
    return pairs.reshape(*lead, groups, length, length), since, until, since[..., -1, :]


def weigh_own(q_AxGxCxE: jax.Array, k_AxCxE: jax.Array) -> jax.Array:
    """Computes the weights of pairs with j = i, which no factor changes, on the diagonal of [A, G, C, C]; float32."""
    own = jnp.sum(q_AxGxCxE.astype(jnp.float32) * k_AxCxE[..., None, :, :].astype(jnp.float32), axis=-1)
    return jnp.eye(k_AxCxE.shape[-2], dtype=jnp.float32) * own[..., None]


def add_logs(channel_log_decay_BxLxKxE: jax.Array, log_decay_BxLxK: jax.Array | None) -> jax.Array:
    """Returns the logs of each channel's factors, float32, with the factors of whole heads; None: there are none."""
    log_decay = channel_log_decay_BxLxKxE.astype(jnp.float32)
    return log_decay if log_decay_BxLxK is None else log_decay + log_decay_BxLxK.astype(jnp.float32)[..., None]


def _weigh_in_base(q: jax.Array, k: jax.Array, halves: Halves, m: int, base: int) -> jax.Array:
    """Computes the pairs that meet between halves of m tokens in blocks of `base`, [A, G, C / base, base, base]."""
    i = np.arange(base)
    is_second = (i // m) % 2 == 1
    together = is_second[:, None] & ~is_second & (i[:, None] // (2 * m) == i // (2 * m))
    *_, length, size = q.shape
    in_second = np.tile(is_second, length // base)[:, None]
    factors = jnp.exp(jnp.where(in_second, *halves))
    q, k = _multiply(q, factors[:, None]), _multiply(k, factors)
    q = q.reshape(*q.shape[:2], length // base, base, size)
    products = dot('agnie,anje->agnij', q, k.reshape(len(k), length // base, base, size))
    return jnp.where(together, products, 0.0)


def _weigh_across(q: jax.Array, k: jax.Array, halves: Halves, m: int) -> jax.Array:
    """Computes the pairs that meet between halves of m tokens, [A, G, C / 2m, m, m]."""
    since, until = (_cut(x, m) for x in halves)
    since, until = since[:, :, 1], until[:, :, 0]
    q = _multiply(_cut(q, m)[..., 1, :, :], jnp.exp(since)[:, None])
    return dot('agnie,anje->agnij', q, _multiply(_cut(k, m)[:, :, 0], jnp.exp(until)))


def _multiply(x: jax.Array, factors: jax.Array) -> jax.Array:
    return (x.astype(jnp.float32) * factors).astype(x.dtype)
