"""The pieces in which the intermediate files become a store: each file of an array, and the SHA-256 of each split.

Any machine makes any piece, in any order and any number of times. A marker shows that a piece is made.
"""

import dataclasses
import hashlib
from typing import NamedTuple

import numpy as np

from lm.data import store
from lm.data.prepare.counts import DamagedPartError, ShardCounts
from lm.data.prepare.shards import LENGTHS, TOKENS, Result
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
    """Makes a piece of the store `path`, unless its marker shows that it is made.

    Raises DamagedPartError after it has discarded the shard, and all pieces that may hold it.
    """
    if folder.read(piece.marker) is not None:
        return
    try:
        content = _make(folder, path, piece)
    except DamagedPartError as error:
        discard(folder, error)
        raise
    folder.write(piece.marker, content)


def discard(folder: SharedFolder, error: DamagedPartError) -> None:
    """Makes a damaged shard one that is not finished, and the pieces of its split ones that are not made."""
    Result(folder, error.base).discard()
    made = f'{MADE}/{error.base.partition("/")[0]}'
    for name in folder.list_names(made):
        folder.remove(f'{made}/{name}')


def _make(folder: SharedFolder, path: str, piece: StorePiece) -> bytes:
    """Returns the contents of the marker."""
    if piece.name == DIGEST:
        return _digest(folder, piece).encode()
    elements = _read_tokens(folder, piece) if piece.name == 'tokens' else _compute_ends(folder, piece)
    store.write_array_file(path, piece.split, piece.name, piece.number, elements, piece.count)
    return b'made'


def _read_tokens(folder: SharedFolder, piece: StorePiece) -> np.ndarray:
    tokens, start = np.empty(sum(span.stop - span.start for span in piece.spans), piece.dtype), 0
    for span in piece.spans:
        result, count = Result(folder, f'{piece.split}/{span.index:06d}'), span.stop - span.start
        counts = result.require_counts()
        if count < counts.tokens:  # at the ends of the piece; only a whole file can be compared with its digest
            tokens[start : start + count] = result.tokens(tokens.dtype)[span.start : span.stop]
        else:
            whole = tokens[start : start + count]
            if not folder.fill(result.base + TOKENS, 0, whole):
                raise DamagedPartError(result.base, TOKENS)
            counts.check(result.base, TOKENS, hashlib.sha256(whole.data).hexdigest())
        start += count
    return tokens


def _compute_ends(folder: SharedFolder, piece: StorePiece) -> np.ndarray:
    """Returns the document ends of a piece, in tokens from the beginning of the split."""
    ends = []
    for span in piece.spans:
        result = Result(folder, f'{piece.split}/{span.index:06d}')
        ends.append(span.before + np.cumsum(result.lengths())[span.start : span.stop])
    return np.concatenate(ends)


def _digest(folder: SharedFolder, piece: StorePiece) -> str:
    """Computes the SHA-256 of a split as `store.digest_split` defines it. It reads the shards in their order."""
    results = [Result(folder, f'{piece.split}/{index:06d}') for index in range(piece.count)]
    counts = [
        result.parse_counts(content)
        for result, content in zip(results, folder.read_many([f'{r.base}.json' for r in results]), strict=True)
    ]
    digest, names = hashlib.sha256(), [result.base + TOKENS for result in results]
    own, sizes = {name: hashlib.sha256() for name in names}, dict.fromkeys(names, 0)
    for name, block in folder.read_in_blocks(names, AHEAD):
        digest.update(block)
        own[name].update(block)
        sizes[name] += len(block)
    contents = folder.read_many([result.base + LENGTHS for result in results], AHEAD)
    total = 0
    for result, counted, name, content in zip(results, counts, names, contents, strict=True):
        if counted is None or content is None or counted.sizes.get(TOKENS, sizes[name]) != sizes[name]:
            raise DamagedPartError(result.base, '.json' if counted is None else LENGTHS if content is None else TOKENS)
        counted.check(result.base, TOKENS, own[name].hexdigest())
        counted.check(result.base, LENGTHS, hashlib.sha256(content).hexdigest())
        lengths = np.frombuffer(content, np.int64)
        digest.update((total + np.cumsum(lengths)).astype('<i8').data)
        total += int(lengths.sum())
    return digest.hexdigest()
