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
from lm.ops.tpu import LANES


class Hide(Protocol):
    def __call__(self, numbers_KxQ: jax.Array, hidden: float = 0.0) -> jax.Array:
        """Returns the numbers of the keys that the queries see, and `hidden` in the place of the others."""
        ...


@dataclasses.dataclass(frozen=True)
class Window:
    """A window of keys in blocks: a query sees its own and the `tokens` - 1 keys before it.

    Attributes:
        tokens: keys that a query sees.
        block: tokens per block.
        back: the distance from the diagonal of the last block of keys that a block of queries sees.
        whole: the greatest distance of a block of which all queries see all keys; 0 or below: there is none.
    """

    tokens: int
    block: int

    @property
    def back(self) -> int:
        return -(-(self.tokens - 1) // self.block)

    @property
    def whole(self) -> int:
        return self.tokens // self.block - 1

    def cut(self, pieces: list[tuple[slice, slice]], distance: int) -> list[tuple[slice, slice]]:
        """Returns what is left of (queries, keys) of blocks at a distance without the keys that no query sees."""
        found = []
        for queries, keys in pieces:
            first = self.hidden(distance) + queries.start + 1
            start = max(keys.start, first // LANES * LANES)
            if start < keys.stop:
                found.append((queries, slice(start, keys.stop)))
        return found

    def hidden(self, distance: int) -> int:
        """Returns the last key of a block at this distance that is hidden from its first query; below 0: none is."""
        return distance * self.block - self.tokens


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


def walk_by_queries(diagonal_PxI: np.ndarray, window: Window | None = None) -> Walk:
    """Returns the walk over blocks of queries, each with the keys that it sees, and its diagonal last."""
    columns = np.arange(diagonal_PxI.max() + 1)
    pairs = [np.stack(np.nonzero(_sees(diagonal[:, None], columns, window))) for diagonal in diagonal_PxI]
    return Walk(_packed(pairs), diagonal_PxI)


def walk_by_keys(diagonal_PxI: np.ndarray, start: int, stop: int, window: Window | None = None) -> Walk:
    """Returns the walk over blocks of keys, each with the queries of the blocks start … stop - 1 that see it."""
    columns, pairs, following = np.arange(diagonal_PxI.max() + 1), [], []
    for diagonal in diagonal_PxI[:, start:stop]:
        j, i = np.nonzero(_sees(diagonal, columns[:, None], window))
        pairs.append(np.stack([i + start, j]))
        order = np.argsort(diagonal)
        places = np.searchsorted(diagonal[order], columns)
        following.append(order[np.minimum(places, len(order) - 1)])
    return Walk(_packed(pairs), diagonal_PxI, np.stack(following))


def _sees(diagonal: np.ndarray, j: np.ndarray, window: Window | None) -> np.ndarray:
    """Returns whether queries with this diagonal see any key of block j."""
    return (j <= diagonal) if window is None else (j <= diagonal) & (diagonal - j <= window.back)


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
        first_keys: the first block of keys that these queries see.
        opens: True where the step before has other keys.
        closes: True where the next step has other keys.
    """

    i: jax.Array
    j: jax.Array
    last_keys: jax.Array
    first_keys: jax.Array | int
    opens: jax.Array
    closes: jax.Array


def step_of(pairs: jax.Ref, diagonal_I: jax.Ref, t: jax.Array, window: Window | None = None) -> Step:
    """Returns step t, from the tables in scalar memory."""
    i, j = pair_of(pairs, t)
    opens = (t == 0) | (pair_of(pairs, jnp.maximum(t - 1, 0))[1] != j)
    last_keys = jnp.where(pairs[t] >= IDLE, -1, diagonal_I[i])
    first_keys = 0 if window is None else jnp.maximum(last_keys - window.back, 0)
    return Step(i, j, last_keys, first_keys, opens, pair_of(pairs, t + 1)[1] != j)


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
    fine: list[tuple[slice, slice]],
    block: int,
    documents: Boundaries | None,
    step: Step,
    add: Callable[[list[Piece]], None],
    window: Window | None = None,
) -> None:
    """Calls `add` with the pieces of a step in which queries see keys, if there are any.

    Args:
        below: (queries, keys) of a pair of different blocks, in the order of the pieces.
        fine: (queries, keys) of a pair in which some queries do not see some keys because of their distance.
        block: tokens per block.
        documents: what the kernel reads of them.
        step: the place of the kernel in its walk.
        add: takes the pieces of this pair.
        window: the keys that a query sees; None: all before it.
    """
    i, j, last_keys = step[:3]

    hide = functools.partial(_hide, step, block, documents, window)

    def earlier(within: bool) -> None:
        add([Piece(queries, keys, hide(queries, keys, False, within)) for queries, keys in below])

    def sees_all() -> jax.Array:
        return j < last_keys if window is None else (j < last_keys) & (last_keys - j <= window.whole)

    has_whole = window is None or window.whole > 0
    if has_whole and documents is None:
        pl.when(sees_all())(lambda: earlier(within=False))
    elif has_whole and documents is not None:
        first, last = documents.first_and_last(i)
        whole = last <= j * block
        pl.when(sees_all() & whole)(lambda: earlier(within=False))
        pl.when(sees_all() & ~whole & (first < (j + 1) * block))(lambda: earlier(within=True))

    diagonal = [
        (queries, slice(keys.start, min(keys.stop, queries.stop)))
        for queries, keys in fine
        if keys.start < queries.stop
    ]

    @pl.when(j == last_keys)
    def _():
        pieces = diagonal if window is None else window.cut(diagonal, 0)
        add(
            [
                Piece(queries, keys, hide(queries, keys, keys.stop > queries.start + 1, documents is not None, 0))
                for queries, keys in pieces
            ]
        )

    def at_the_edge(distance: int) -> None:
        pieces = [] if window is None else window.cut(fine, distance)
        add([Piece(*piece, hide(*piece, False, documents is not None, distance)) for piece in pieces])

    for distance in [] if window is None else range(max(window.whole, 0) + 1, window.back + 1):
        at = (j == last_keys - distance) & (last_keys >= 0)
        if documents is not None:
            at &= documents.first_and_last(i)[0] < (j + 1) * block
        pl.when(at)(functools.partial(at_the_edge, distance))


def _hide(
    step: Step,
    block: int,
    documents: Boundaries | None,
    window: Window | None,
    queries: slice,
    keys: slice,
    causal: bool,
    within: bool,
    distance: int | None = None,
) -> Hide:
    """Returns the function that hides keys of a piece.

    Args:
        step: the place of the kernel in its walk.
        block: tokens per block.
        documents: what the kernel reads of them.
        window: the keys that a query sees.
        queries: the queries of the piece.
        keys: the keys of the piece.
        causal: whether some keys are after some queries.
        within: whether a document may begin among them.
        distance: the distance of the block from the diagonal; None: all queries see all keys of the block.
    """
    # The keys up to this one, counted from the first at hand, are out of the first query's window.
    edge = None
    if window is not None and distance is not None:
        edge = window.hidden(distance) + queries.start - keys.start
        if edge + queries.stop - queries.start - 1 < 0:
            edge = None
    if not (causal or within or edge is not None):
        return _all

    def seen(numbers_KxQ: jax.Array, hidden: float = 0.0) -> jax.Array:
        key = lax.broadcasted_iota(jnp.int32, numbers_KxQ.shape, 0)
        visible = None
        if causal:
            query = lax.broadcasted_iota(jnp.int32, numbers_KxQ.shape, 1)
            visible = key <= query + (queries.start - keys.start)
        if edge is not None:
            query = lax.broadcasted_iota(jnp.int32, numbers_KxQ.shape, 1)
            inside = key > query + edge
            visible = inside if visible is None else visible & inside
        if within and documents is not None:
            inside = key >= documents.starts[0, :, queries] - (step.j * block + keys.start)
            visible = inside if visible is None else visible & inside
        return numbers_KxQ if visible is None else jnp.where(visible, numbers_KxQ, hidden)

    return seen


def _all(numbers_KxQ: jax.Array, hidden: float = 0.0) -> jax.Array:
    return numbers_KxQ


def cut(length: int, size: int) -> list[slice]:
    """Returns the slices of `size` that make up `length`."""
    return [slice(at, at + size) for at in range(0, length, size)]
