"""Sources of documents. A source lists its splits, cuts a split into shards and reads the documents of a shard.

A shard is a unit of work that any process can read by itself; the shards of a split, one after another, hold its
documents in an order that depends on nothing but the data.

Adding a source means adding one file to this package, which finds it by itself: a class `@configurable('name')` on
`Source`, on `FilePatterns` (many documents per file) or on `Folder` (one document per file).
"""

import abc
import collections
import copy
import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any, Self

import numpy as np

from lm.config.configurable import Configurable
from lm.errors import MismatchError
from lm.files import AnyPath

HELD_OUT_BY = 'held_out_by'
"""The entry of `Source.identity` that says by what documents are held out; earlier versions have none."""
SPLITS = ('train', 'validation', 'test')
MIN_SHARD_BYTES, MAX_SHARD_BYTES = 1_000_000, 64_000_000


@dataclasses.dataclass(frozen=True)
class Part:
    """A file, or a range of it: of bytes (text, JSON lines), of records (TFDS) or of row groups (Parquet)."""

    file: str
    start: int
    stop: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Shard:
    """A unit of work: consecutive documents of one split."""

    split: str
    parts: tuple[Part, ...]
    held_out: float | None = None
    """The share of the documents for validation, where the files hold both splits; else None."""

    @property
    def bytes(self) -> int:
        """The approximate size of its text."""
        total = sum(part.bytes for part in self.parts)
        if self.held_out is None:
            return total
        if self.split == 'train':
            return int((1 - self.held_out) * total)
        return int(self.held_out * total)


@dataclasses.dataclass(frozen=True)
class Document:
    """A document, or an error in its place."""

    id: str
    text: str = ''
    error: str | None = None
    tokens: np.ndarray | None = None
    """In place of the text: its token ids, with or without the end-of-document token [tokens], integers."""
    answers: tuple[tuple[int, int], ...] = ()
    """Beginning and end of the parts of the text that are predicted in training, where a source marks them."""

    def digest(self) -> bytes:
        """Computes the SHA-256 of the text, or of the tokens, which copies of a document have in common."""
        if self.tokens is not None:
            return hashlib.sha256(self.tokens.astype('<i8').tobytes()).digest()
        return hashlib.sha256(self.text.encode(errors='surrogatepass')).digest()


class Source(Configurable, abc.ABC):
    """Base of the sources. Instances are frozen dataclasses and travel to the worker processes."""

    holds_tokens = False
    """The documents are token ids of an existing tokenizer in place of text."""
    by_place = False
    """Documents are held out by their places, as earlier versions did it: copies fall into two splits."""
    marks_answers = False
    """Only parts of the documents are predicted in training, and names of special tokens in them are these tokens."""
    gin_resume = True
    """A run reads the token store, whose fingerprint identifies it; the place of its source does not matter."""

    @property
    def how_to_hold_out(self) -> str:
        """The remedy where this source has no validation split."""
        return 'add files for validation'

    def fetch(self, log) -> None:
        """Downloads missing files, if the source can; `log(line)` reports progress."""

    def settle(self, tokenizer: str | None) -> 'Source':
        """Returns the source with what it takes from the tokenizer, whose place is given."""
        return self

    def check_eod(self, eod: int) -> None:
        """Raises ConfigError unless `eod` ends the documents of ready tokens."""

    def identity(self) -> dict[str, object]:
        """Returns the record of the source for dataset.json. Preparations with equal identities read the same text."""
        return {'kind': self.gin_name, **dataclasses.asdict(self)}

    def keep_old_split(self) -> Self:
        """Returns this source with the documents held out that earlier versions held out."""
        made = copy.copy(self)
        object.__setattr__(made, 'by_place', True)  # no field: it is no choice for a new store
        return made

    def list_unread(self) -> list[str]:
        """Returns the names of files in the folder of the source that no split takes."""
        return []

    def published_words(self, split: str, documents: int) -> int | None:
        """Returns the published number of words in a split with so many documents; None: there is none.

        It stands in dataset.json, and normalizes perplexity per word.
        """
        return None

    @abc.abstractmethod
    def splits(self) -> tuple[str, ...]:
        """Returns the names of the splits. Raises ConfigError if there is no data."""

    @abc.abstractmethod
    def shards(self, split: str) -> list[Shard]:
        """Returns the shards of a split in order."""

    @abc.abstractmethod
    def read(self, shard: Shard, max_bytes: int) -> Iterator[Document]:
        """Yields the documents of a shard in order; documents longer than `max_bytes` come as errors, unread."""


def inventory(shards: Iterable[Shard]) -> dict[str, Any]:
    """Returns the number of files, their approximate size and a fingerprint of their names and sizes.

    The fingerprint does not depend on the cuts. It detects cheaply that a source has changed.
    """
    sizes = collections.Counter()
    for part in dict.fromkeys(part for shard in shards for part in shard.parts):  # splits may share them
        sizes[part.file] += part.bytes
    digest = hashlib.sha256(json.dumps(sorted(sizes.items())).encode()).hexdigest()
    return {'count': len(sizes), 'bytes': sizes.total(), 'sha256': digest}


def decode(identifier: str, content: bytes, max_bytes: int) -> Document:
    """Returns the document whose UTF-8 is `content`, or an error in its place."""
    if len(content) > max_bytes:
        return too_long(identifier, max_bytes)
    try:
        return Document(identifier, content.decode('utf-8-sig'))  # a byte order mark is none of the text
    except UnicodeDecodeError:
        return Document(identifier, error='invalid UTF-8')


def hold_tokens(identifier: str, tokens: np.ndarray, max_bytes: int) -> Document:
    """Returns the document of ready tokens, or an error in its place."""
    return Document(identifier, tokens=tokens) if tokens.nbytes <= max_bytes else too_long(identifier, max_bytes)


def too_long(identifier: str, max_bytes: int) -> Document:
    """Returns the error that stands in place of a document longer than `max_bytes`."""
    return Document(identifier, error=f'longer than prepare.max_document_bytes = {max_bytes}')


def group(split: str, parts: list[Part], held_out: float | None = None) -> list[Shard]:
    """Groups consecutive parts into shards."""
    unit = shard_bytes(sum(part.bytes for part in parts))
    shards, current, size = [], [], 0
    for part in parts:
        if current and size + part.bytes > unit:
            shards.append(Shard(split, tuple(current), held_out))
            current, size = [], 0
        current.append(part)
        size += part.bytes
    return [*shards, Shard(split, tuple(current), held_out)] if current else shards


def shard_bytes(total: int) -> int:
    """Returns the size of shards in bytes: about 256 shards of 1 to 64 MB."""
    return min(MAX_SHARD_BYTES, max(MIN_SHARD_BYTES, total // 256))


def regular(paths: Iterable[AnyPath]) -> list[AnyPath]:
    """Returns files in the order of their names, without folders.

    Raises MismatchError for what cannot be read like a file: a broken link, a pipe, a device. Buckets have none.
    """
    found = sorted(path for path in paths if not path.is_dir())
    for path in found:
        if isinstance(path, pathlib.Path) and not path.is_file():
            raise MismatchError(f'{path}: a broken link or no regular file; mend it or move it away')
    return found


def hash_of(name: str) -> float:
    """Returns a number uniform in [0, 1), a pure function of the name, which decides whether a document is held out."""
    return fraction_of(hashlib.sha256(name.encode(errors='surrogateescape')).digest())


def fraction_of(digest: bytes) -> float:
    """Returns a number uniform in [0, 1), a pure function of a digest."""
    return int.from_bytes(digest[:6], 'big') / 2**48
