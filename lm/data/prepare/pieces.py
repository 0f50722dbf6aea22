"""The pieces in which the intermediate files become a store: each file of an array, and the SHA-256 of each split.

Any machine makes any piece, in any order and any number of times. A marker shows that a piece is made.
"""

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from lm.data import store
from lm.data.prepare.counts import DamagedPartError, ShardCounts
from lm.data.prepare.shards import LENGTHS, TOKENS, name_shard, name_shards, read_counts, read_parts
from lm.data.prepare.shared_folder import SharedFolder

DIGEST = 'sha256'
"""The name of the piece that is no file of an array: the digest of a split."""
MADE = 'made'
"""The folder of the markers, which for a digest hold it."""
AHEAD = 4
"""Shards that are read ahead for a digest."""


class Span(NamedTuple):
    """Elements of one shard that belong to a piece: from `start` to `stop`."""

    index: int
    start: int
    stop: int
    before: int
    """Tokens of the split before the shard."""


@dataclasses.dataclass(frozen=True)
class StorePiece:
    """A file of the array {split}/{name}, or the digest of the split."""

    split: str
    name: str
    number: int
    """The number of the file; for a digest 0."""
    count: int
    """Elements of the whole array; for a digest the number of shards."""
    dtype: str
    """The type of the elements; for a digest, of the tokens."""
    spans: tuple[Span, ...] = ()

    @property
    def marker(self) -> str:
        """The name of the file that shows that the piece is made."""
        return f'{MADE}/{self.split}/{self.name}/{self.number:06d}'

    @property
    def bytes(self) -> int:
        """The size of the elements."""
        return sum(span.stop - span.start for span in self.spans) * np.dtype(self.dtype).itemsize


def cut_pieces(split: str, counts: list[ShardCounts], dtype: str) -> list[StorePiece]:
    """Returns the pieces of a split from the counts of its shards. The digest, which takes longest, comes first."""
    tokens = np.array([c.tokens for c in counts], np.int64)
    documents = np.array([c.documents for c in counts], np.int64)
    before = np.cumsum(tokens) - tokens
    return [
        StorePiece(split, DIGEST, 0, len(counts), dtype),
        *_cut_array(split, 'tokens', tokens, before, dtype),
        *_cut_array(split, 'document_ends', documents, before, 'int64'),
    ]


def _cut_array(split: str, name: str, sizes: np.ndarray, before: np.ndarray, dtype: str) -> list[StorePiece]:
    ends = np.cumsum(sizes)
    total = int(ends[-1])
    pieces = []
    for number, start in enumerate(range(0, total, store.SHARD)):
        stop = min(start + store.SHARD, total)
        first, last = np.searchsorted(ends, start, 'right'), np.searchsorted(ends, stop, 'left')
        spans = []
        for i in range(int(first), int(last) + 1):
            begin = int(ends[i] - sizes[i])
            spans.append(Span(i, max(0, start - begin), min(int(sizes[i]), stop - begin), int(before[i])))
        spans = tuple(span for span in spans if span.start < span.stop)
        pieces.append(StorePiece(split, name, number, total, dtype, spans))
    return pieces


def make_piece(folder: SharedFolder, path: str, piece: StorePiece) -> None:
    """Makes a piece of the store `path`, unless its marker shows that it is made. Raises DamagedPartError."""
    if folder.read(piece.marker) is not None:
        return
    content = b'made'
    if piece.name == DIGEST:
        content = _digest(folder, piece).encode()
    else:
        elements = _read_elements(folder, piece)
        store.write_array_file(path, piece.split, piece.name, piece.number, elements, piece.count)
    folder.write(piece.marker, content)


@contextlib.contextmanager
def discarding(folder: SharedFolder) -> Iterator[None]:
    """A block whose DamagedPartError makes the shard, and the pieces of its split, ones that are not made."""
    try:
        yield
    except DamagedPartError as error:
        folder.remove(f'{error.base}.json')
        forget_pieces(folder, error.base.partition('/')[0])
        raise


def forget_pieces(folder: SharedFolder, split: str) -> None:
    """Makes the pieces of a split ones that are not made."""
    for name in folder.list_names(f'{MADE}/{split}'):
        folder.remove(f'{MADE}/{split}/{name}')


def _read_elements(folder: SharedFolder, piece: StorePiece) -> np.ndarray:
    """Returns the tokens of a piece, or its document ends in tokens from the beginning of the split."""
    elements, start = np.empty(sum(span.stop - span.start for span in piece.spans), piece.dtype), 0
    for span in piece.spans:
        bases = [name_shard(piece.split, span.index)]
        suffix = TOKENS if piece.name == 'tokens' else LENGTHS
        (content,) = read_parts(folder, bases, read_counts(folder, bases), suffix)
        own = np.frombuffer(content, piece.dtype)
        own = own if suffix == TOKENS else span.before + np.cumsum(own)
        elements[start : start + span.stop - span.start] = own[span.start : span.stop]
        start += span.stop - span.start
    return elements


def _digest(folder: SharedFolder, piece: StorePiece) -> str:
    """Computes the SHA-256 of a split: of its tokens and document ends. It reads the shards in their order."""
    bases = name_shards(piece.split, piece.count)
    digest, counts, total = hashlib.sha256(), read_counts(folder, bases), 0
    for content in read_parts(folder, bases, counts, TOKENS, AHEAD):
        digest.update(content)
    for content in read_parts(folder, bases, counts, LENGTHS):
        lengths = np.frombuffer(content, np.int64)
        digest.update((total + np.cumsum(lengths)).astype('<i8').data)
        total += int(lengths.sum())
    return digest.hexdigest()
