"""The matrix of queries, keys and values; where keys and values are latent, of queries alone."""

import jax
import jax.numpy as jnp

from lm.model.dense import Dense
from lm.model.options import ResolvedLayer
from lm.model.parts.maker import Maker


def make_qkv(maker: Maker) -> Dense:
    own, config = maker.options, maker.config
    rows, axis = (config.d_model, 'embed') if own.latent_query_rank is None else (own.latent_query_rank, 'logits')
    return maker.linear(rows, own.projected_sizes, axis, 'all_heads', part='attention', biased=config.qkv_biases)


def split_heads(products: list[jax.Array], own: ResolvedLayer) -> list[jax.Array]:
    """Returns the products [B, L, N] of queries, keys and values as heads, [B, L, N / size, size]."""
    sizes = *[own.dims.head_dim] * (len(products) - 1), own.dims.value_size
    return [x.reshape(*x.shape[:2], -1, size) for x, size in zip(products, sizes, strict=True)]


def repeat_heads(q_BxLxHxC: jax.Array, k_BxLxKxC: jax.Array, own: ResolvedLayer) -> tuple[jax.Array, jax.Array]:
    """Returns queries and keys with as many heads as the mechanism has, where the layer projects fewer."""
    if not own.repeats:
        return q_BxLxHxC, k_BxLxKxC
    return (
        jnp.repeat(q_BxLxHxC, own.dims.n_heads // own.heads.queries, axis=2),
        jnp.repeat(k_BxLxKxC, own.dims.n_kv_heads // own.heads.keys, axis=2),
    )
