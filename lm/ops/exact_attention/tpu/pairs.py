"""Pairs (block of queries, block of keys) of a kernel: which it visits, and which keys of a pair the queries see.

K keys, Q queries of a pair; B rows of the batch, I blocks of queries, L tokens.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from lm.ops import sequence


class Hide(Protocol):
    def __call__(self, numbers_KxQ: jax.Array, hidden: float = 0.0) -> jax.Array:
        """Returns the numbers of the keys that the queries see, and `hidden` in the place of the others."""
        ...


IDLE = 1 << 30
"""Marks a pair that is there for the length of a table alone."""


@dataclasses.dataclass(frozen=True)
class Walk:
    """The pairs that a grid visits, in order, on each of P parts of a window; each part has its own tables.

    Attributes:
        pairs_PxT: i << 16 | j of each grid step, for block i of queries and j of keys; an idle entry follows the last.
        diagonal_PxI: the block of keys with the same tokens as block i of the queries, which sees keys up to it.
        next_PxJ: only of a walk by keys: the place, among its queries, of the block whose diagonal comes first at j or
            later.
    """

    pairs_PxT: np.ndarray
    diagonal_PxI: np.ndarray
    next_PxJ: np.ndarray | None = None

    @property
    def steps(self) -> int:
        return self.pairs_PxT.shape[1] - 1

    def tables(self, part: jax.Array | None) -> list[jax.Array]:
        """Returns the tables that scalar memory holds on a device that has this part."""
        arrays = [a for a in (self.pairs_PxT, self.diagonal_PxI, self.next_PxJ) if a is not None]
        return [jnp.asarray(a[0] if part is None else a, jnp.int32)[() if part is None else part] for a in arrays]


@functools.lru_cache(maxsize=32)
def number_diagonals(blocks: int, parts: int) -> np.ndarray:
    """Returns `Walk.diagonal_PxI` of `blocks` blocks of queries per part.

    A part is a whole window, or two halves of parts in the order of `lm.ops.sequence.balanced`.
    """
    if parts == 1:
        return np.arange(blocks)[None]
    halves_Px2 = np.array(sequence.halves(parts))
    return (halves_Px2[:, :, None] * (blocks // 2) + np.arange(blocks // 2)).reshape(parts, blocks)


def walk_by_queries(diagonal_PxI: np.ndarray) -> Walk:
    """Returns the walk over blocks of queries, each with the keys that it sees, and its diagonal last."""
    columns = np.arange(diagonal_PxI.max() + 1)
    pairs = [np.stack(np.nonzero(diagonal[:, None] >= columns)) for diagonal in diagonal_PxI]
    return Walk(_packed(pairs), diagonal_PxI)


def walk_by_keys(diagonal_PxI: np.ndarray, start: int, stop: int) -> Walk:
    """Returns the walk over blocks of keys, each with the queries of the blocks start … stop - 1 that see it."""
    columns, pairs, following = np.arange(diagonal_PxI.max() + 1), [], []
    for diagonal in diagonal_PxI[:, start:stop]:
        j, i = np.nonzero(columns[:, None] <= diagonal)
        pairs.append(np.stack([i + start, j]))
        order = np.argsort(diagonal)
        places = np.searchsorted(diagonal[order], columns)
        following.append(order[np.minimum(places, len(order) - 1)])
    return Walk(_packed(pairs), diagonal_PxI, np.stack(following))


def _packed(pairs: list[np.ndarray]) -> np.ndarray:
    steps = max(part.shape[1] for part in pairs)
    rows = []
    for i, j in pairs:
        row = i << 16 | j
        rows.append(np.concatenate([row, np.full(steps - len(row), row[-1] | IDLE), [IDLE - 1]]))
    return np.stack(rows)


def pair_of(table: jax.Ref, t: jax.Array) -> tuple[jax.Array, jax.Array]:
    return (table[t] & (IDLE - 1)) >> 16, table[t] & 0xFFFF


class Step(NamedTuple):
    """The place of a kernel in its walk.

    Attributes:
        i: the block of queries.
        j: the block of keys.
        last_keys: the last block of keys that these queries see; -1 where there is nothing to do.
        opens: True where the step before has other keys.
        closes: True where the next step has other keys.
    """

    i: jax.Array
    j: jax.Array
    last_keys: jax.Array
    opens: jax.Array
    closes: jax.Array


def step_of(pairs: jax.Ref, diagonal_I: jax.Ref, t: jax.Array) -> Step:
    """Returns step t, from the tables in scalar memory."""
    i, j = pair_of(pairs, t)
    opens = (t == 0) | (pair_of(pairs, jnp.maximum(t - 1, 0))[1] != j)
    last_keys = jnp.where(pairs[t] >= IDLE, -1, diagonal_I[i])
    return Step(i, j, last_keys, opens, pair_of(pairs, t + 1)[1] != j)


@dataclasses.dataclass(frozen=True)
class Boundaries:
    """The numbers that a kernel reads of the documents of a window.

    Attributes:
        ends: ref [B, 2·I] in scalar memory: the first start of each block of queries, then the last of each.
        starts: ref [1, 1, Q]: the first key that each query at hand sees.
        row: of the batch.
    """

    ends: jax.Ref
    starts: jax.Ref
    row: jax.Array

    def first_and_last(self, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self.ends[self.row, i], self.ends[self.row, i + self.ends.shape[1] // 2]


def document_arrays(starts_BxL: jax.Array | None, block: int) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns the arrays that tell a kernel where documents begin: scalars to prefetch, and rows [B, 1, L].

    Both lists have one array, or none where starts is None. Starts ascend along L.
    """
    if starts_BxL is None:
        return [], []
    ends_Bx2I = jnp.concatenate([starts_BxL[:, ::block], starts_BxL[:, block - 1 :: block]], axis=1)
    return [ends_Bx2I], [starts_BxL[:, None]]


def split_documents(heads: int | None, refs: tuple) -> tuple[Boundaries | None, tuple]:
    """Splits the refs of a kernel into the arrays of `document_arrays` and all others.

    Args:
        heads: how many steps the grid's first axis has for each row of the batch; None: there are no documents.
        refs: all refs of the kernel after the tables of its walk.
    """
    if heads is None:
        return None, refs
    ends, starts, *others = refs
    return Boundaries(ends, starts, lax.div(pl.program_id(0), jnp.int32(heads))), tuple(others)


class Piece(NamedTuple):
    """Some queries and some keys of a pair of blocks, and a function that hides keys that the queries do not see."""

    queries: slice
    keys: slice
    seen: Hide


def visit(
    below: list[tuple[slice, slice]],
    diagonal: list[tuple[slice, slice]],
    block: int,
    documents: Boundaries | None,
    step: Step,
    add: Callable[[list[Piece]], None],
) -> None:
    """Calls `add` with the pieces of a step in which queries see keys, if there are any.

    Args:
        below: (queries, keys) of a pair of different blocks, in the order of the pieces.
        diagonal: (queries, keys) of the same tokens; keys after all of their queries are left out.
        block: tokens per block.
        step: the place of the kernel in its walk.
        add: takes the pieces of this pair.
    """
    i, j, last_keys = step[:3]

    def hide(queries: slice, keys: slice, causal: bool, within: bool) -> Hide:
        if not (causal or within):
            return _all

        def seen(numbers_KxQ: jax.Array, hidden: float = 0.0) -> jax.Array:
            key = lax.broadcasted_iota(jnp.int32, numbers_KxQ.shape, 0)
            visible = None
            if causal:
                query = lax.broadcasted_iota(jnp.int32, numbers_KxQ.shape, 1)
                visible = key <= query + (queries.start - keys.start)
            if within and documents is not None:
                inside = key >= documents.starts[0, :, queries] - (j * block + keys.start)
                visible = inside if visible is None else visible & inside
            return numbers_KxQ if visible is None else jnp.where(visible, numbers_KxQ, hidden)

        return seen

    def earlier(within: bool) -> None:
        add([Piece(queries, keys, hide(queries, keys, False, within)) for queries, keys in below])

    if documents is None:
        pl.when(j < last_keys)(lambda: earlier(within=False))
    else:
        first, last = documents.first_and_last(i)
        whole = last <= j * block
        pl.when((j < last_keys) & whole)(lambda: earlier(within=False))
        pl.when((j < last_keys) & ~whole & (first < (j + 1) * block))(lambda: earlier(within=True))

    @pl.when(j == last_keys)
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
    """Returns the slices of `size` that make up `length`."""
    return [slice(at, at + size) for at in range(0, length, size)]
