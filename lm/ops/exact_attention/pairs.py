"""Pairs (block of queries, block of keys) of a kernel: which it visits, and which keys of a pair the queries see.

K keys, Q queries of a pair; B rows of the batch, I blocks of queries, L tokens.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

Hide = Callable[[jax.Array], jax.Array]
"""Weights [K, Q] → those of keys that the queries see, and zeros."""


def table_of(pairs: list[tuple[int, int]]) -> jax.Array:
    """The pairs for scalar memory: both numbers in one, because it is scarce."""
    return jnp.asarray(np.array([i << 16 | j for i, j in pairs], np.int32))


def pair_of(table: Any, t: jax.Array) -> tuple[jax.Array, jax.Array]:
    return table[t] >> 16, table[t] & 0xFFFF


@dataclasses.dataclass(frozen=True)
class Boundaries:
    """What a kernel reads of the documents of a window.

    Attributes:
        ends: ref [B, 2·I] in scalar memory: the first start of each block of queries, then the last of each.
        starts: ref [1, 1, Q]: the first key that each query at hand sees.
        row: of the batch.
    """

    ends: Any
    starts: Any
    row: jax.Array

    def first_and_last(self, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self.ends[self.row, i], self.ends[self.row, i + self.ends.shape[1] // 2]


def tables_of(starts_BxL: jax.Array | None, block: int) -> tuple[list[jax.Array], list[jax.Array]]:
    """What becomes of ascending starts, if there are any: scalars to prefetch, and rows [B, 1, L]."""
    if starts_BxL is None:
        return [], []
    ends_Bx2I = jnp.concatenate([starts_BxL[:, ::block], starts_BxL[:, block - 1 :: block]], axis=1)
    return [ends_Bx2I], [starts_BxL[:, None]]


def told_apart(heads: int | None, refs: tuple) -> tuple[Boundaries | None, tuple]:
    """The refs of documents, and all others. The grid's first axis has `heads` for each row of the batch; None: there
    are no documents."""
    if heads is None:
        return None, refs
    ends, starts, *others = refs
    return Boundaries(ends, starts, lax.div(pl.program_id(0), jnp.int32(heads))), tuple(others)


def visit(
    block: int,
    tile: int,
    diagonal: int,
    documents: Boundaries | None,
    i: jax.Array,
    j: jax.Array,
    add: Callable[[slice, slice, Hide], None],
) -> None:
    """Calls `add` for what the queries of block i see of the keys of block j ≤ i, and not at all where that is nothing.

    Args:
        block: tokens a block.
        tile: keys at a time.
        diagonal: queries at a time where queries and keys are the same tokens.
        add: takes which queries and which keys of the blocks.
    """

    def hide(queries: slice, keys: slice, causal: bool) -> Hide:
        def seen(weights_KxQ: jax.Array) -> jax.Array:
            key = lax.broadcasted_iota(jnp.int32, weights_KxQ.shape, 0)
            visible = None
            if causal:
                query = lax.broadcasted_iota(jnp.int32, weights_KxQ.shape, 1)
                visible = key <= query + (queries.start - keys.start)
            if documents is not None:
                inside = key >= documents.starts[0, :, queries] - (j * block + keys.start)
                visible = inside if visible is None else visible & inside
            return jnp.where(visible, weights_KxQ, 0.0)

        return seen

    def below(masked: bool) -> None:
        queries = slice(0, block)
        for keys in _cut(block, tile):
            add(queries, keys, hide(queries, keys, causal=False) if masked else lambda weights_KxQ: weights_KxQ)

    if documents is None:
        pl.when(j < i)(lambda: below(masked=False))
    else:
        first, last = documents.first_and_last(i)
        whole = last <= j * block
        pl.when((j < i) & whole)(lambda: below(masked=False))
        pl.when((j < i) & ~whole & (first < (j + 1) * block))(lambda: below(masked=True))

    @pl.when(j == i)
    def _():
        for queries in _cut(block, diagonal):
            keys = slice(0, queries.stop)
            add(queries, keys, hide(queries, keys, causal=True))


def _cut(block: int, tile: int) -> list[slice]:
    return [slice(at, at + tile) for at in range(0, block, tile)]
