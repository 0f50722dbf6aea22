"""The pieces in which the intermediate files become a store: each file of an array, and the SHA-256 of each split.

Any machine makes any piece, in any order and any number of times. A marker shows that a piece is made.
"""

import dataclasses
import hashlib
from typing import NamedTuple

import numpy as np

from lm.data import store
from lm.data.prepare.counts import ShardCounts
from lm.data.prepare.shards import Result
from lm.data.prepare.shared_folder import SharedFolder
from lm.errors import LmError

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
    """Makes a piece of the store `path`, unless its marker shows that it is made."""
    if folder.read(piece.marker) is not None:
        return
    if piece.name == DIGEST:
        content = _digest(folder, piece).encode()
    else:
        elements = _read_tokens(folder, piece) if piece.name == 'tokens' else _compute_ends(folder, piece)
        store.write_array_file(path, piece.split, piece.name, piece.number, elements, piece.count)
        content = b'made'
    folder.write(piece.marker, content)


def _read_tokens(folder: SharedFolder, piece: StorePiece) -> np.ndarray:
    tokens, start = np.empty(sum(span.stop - span.start for span in piece.spans), piece.dtype), 0
    for span in piece.spans:
        name, count = f'{piece.split}/{span.index:06d}.tokens', span.stop - span.start
        if not folder.fill(name, span.start * tokens.itemsize, tokens[start : start + count]):
            raise _explain_missing(name)
        start += count
    return tokens


def _compute_ends(folder: SharedFolder, piece: StorePiece) -> np.ndarray:
    """Returns the document ends of a piece, in tokens from the beginning of the split."""
    ends = []
    for span in piece.spans:
        result = Result(folder, f'{piece.split}/{span.index:06d}')
        ends.append(span.before + np.cumsum(result.lengths(0, span.stop))[span.start :])
    return np.concatenate(ends)


def _digest(folder: SharedFolder, piece: StorePiece) -> str:
    """Computes the SHA-256 of a split as `store.digest_split` defines it. It reads the shards in their order."""
    digest = hashlib.sha256()
    names = [f'{piece.split}/{index:06d}' for index in range(piece.count)]
    for block in folder.read_in_blocks([f'{name}.tokens' for name in names], AHEAD):
        digest.update(_require(block, f'{piece.split}/….tokens'))
    total = 0
    for name, content in zip(names, folder.read_many([f'{name}.lengths' for name in names], AHEAD), strict=True):
        lengths = np.frombuffer(_require(content, name), np.int64)
        digest.update((total + np.cumsum(lengths)).astype('<i8').data)
        total += int(lengths.sum())
    return digest.hexdigest()


def _require(content: bytes | memoryview | None, name: str) -> bytes | memoryview:
    if content is None:
        raise _explain_missing(name)
    return content


def _explain_missing(name: str) -> LmError:
    return LmError(f'{name} of the intermediate files is missing; run the same command again')
