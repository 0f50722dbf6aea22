"""Other ways to compute polysketch's operation, which `lm bench attention` measures ours against.

Each is a function of a layer and its arrays: sketches of queries and keys, values, and the normalized vectors that the
exact weights compare. The block must divide the length.

plain  the formulas of PolySketchFormer §3 as they read
scan   ours, block by block the same, with all blocks at once and an associative scan over their sums
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from lm.attention.polysketch import PolysketchAttention
from lm.ops.linear_attention import xla
from lm.ops.linear_attention.block import (
    BlockKeys,
    BlockQueries,
    Shape,
    fold,
    grouped,
    numerators,
    token_minor,
    ungrouped,
)
from lm.ops.linear_attention.reference import plain_blocks
from lm.ops.linear_attention.types import Options


def plain(layer: PolysketchAttention, arrays: Sequence[jax.Array]) -> jax.Array:
    """[B, L, H, D]"""
    config = layer.config
    return plain_blocks(
        *arrays, degree=config.degree, block=min(config.block, arrays[0].shape[1]), denominator_bias=config.bias
    )


def scan(layer: PolysketchAttention, arrays: Sequence[jax.Array]) -> jax.Array:
    """[B, L, H, D]. Differentiated by JAX, which keeps the sums of all blocks."""
    q_BxLxHxE, k_BxLxHxE, v_BxLxHxD, q_local_BxLxHxC, k_local_BxLxHxC = arrays
    batch, length, heads, _ = v_BxLxHxD.shape
    block = min(layer.config.block, length)
    blocks = length // block
    shape = Shape(Options(**layer._options()), xla.TILE['cpu'], True, v_BxLxHxD.dtype)

    def cut(x):
        return x.reshape(batch * blocks, block, *x.shape[2:])

    def earlier(sums):
        each = sums.reshape(batch, blocks, *sums.shape[1:])
        return (lax.associative_scan(jnp.add, each, axis=1) - each).reshape(sums.shape)

    queries = BlockQueries(*(grouped(cut(x), heads) for x in (q_BxLxHxE, q_local_BxLxHxC)))
    keys = BlockKeys(*(token_minor(cut(x)) for x in (k_BxLxHxE, v_BxLxHxD, k_local_BxLxHxC)))
    sums = jax.tree.map(earlier, fold(shape, keys, None, None, 0))
    num, den = numerators(shape, queries, keys, (None, None), sums, None, 0)
    return ungrouped(num / den[:, :, None]).reshape(v_BxLxHxD.shape).astype(v_BxLxHxD.dtype)


FORMULATIONS: dict[str, Callable[[PolysketchAttention, Sequence[jax.Array]], jax.Array]] = {
    'plain': plain,
    'scan': scan,
}
