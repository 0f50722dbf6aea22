"""Pairs (block of queries, block of keys) of a kernel: which it visits, and which keys of a pair the queries see.

K keys, Q queries of a pair; B rows of the batch, I blocks of queries, L tokens.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl


class Hide(Protocol):
    def __call__(self, numbers_KxQ: jax.Array, hidden: float = 0.0) -> jax.Array:
        """The numbers of keys that the queries see, and `hidden` in the place of the others."""


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


class Piece(NamedTuple):
    """Some queries and some keys of a pair of blocks, and what hides those keys that the queries do not see."""

    queries: slice
    keys: slice
    seen: Hide


def visit(
    below: list[tuple[slice, slice]],
    diagonal: list[tuple[slice, slice]],
    block: int,
    documents: Boundaries | None,
    i: jax.Array,
    j: jax.Array,
    add: Callable[[list[Piece]], None],
) -> None:
    """Calls `add` with what the queries of block i see of the keys of block j ≤ i, where that is anything.

    Args:
        below: (queries, keys) of a pair of different blocks, in the order of the pieces.
        diagonal: the same where queries and keys are the same tokens; keys after all of their queries are left out.
        block: tokens a block.
        add: takes the pieces of this pair.
    """

    def hide(queries: slice, keys: slice, causal: bool, within: bool) -> Hide:
        if not (causal or within):
            return _all

        def seen(numbers_KxQ: jax.Array, hidden: float = 0.0) -> jax.Array:
            key = lax.broadcasted_iota(jnp.int32, numbers_KxQ.shape, 0)
            visible = None
            if causal:
                query = lax.broadcasted_iota(jnp.int32, numbers_KxQ.shape, 1)
                visible = key <= query + (queries.start - keys.start)
            if within:
                inside = key >= documents.starts[0, :, queries] - (j * block + keys.start)
                visible = inside if visible is None else visible & inside
            return jnp.where(visible, numbers_KxQ, hidden)

        return seen

    def earlier(within: bool) -> None:
        add([Piece(queries, keys, hide(queries, keys, False, within)) for queries, keys in below])

    if documents is None:
        pl.when(j < i)(lambda: earlier(within=False))
    else:
        first, last = documents.first_and_last(i)
        whole = last <= j * block
        pl.when((j < i) & whole)(lambda: earlier(within=False))
        pl.when((j < i) & ~whole & (first < (j + 1) * block))(lambda: earlier(within=True))

    @pl.when(j == i)
    def _():
        add(
            [
                Piece(queries, keys, hide(queries, keys, keys.stop > queries.start + 1, documents is not None))
                for queries, keys in diagonal
            ]
        )


def _all(numbers_KxQ: jax.Array, hidden: float = 0.0) -> jax.Array:
    return numbers_KxQ


def cut(length: int, size: int) -> list[slice]:
    """The slices of `size` that make up `length`."""
    return [slice(at, at + size) for at in range(0, length, size)]
