"""Where documents come from: each source lists its splits, cuts a split into shards and reads the documents of a shard.

A shard is a unit of work that any process can read by itself; the shards of a split, one after another, hold its
documents in an order that depends on nothing but the data.
"""

import abc
import dataclasses
import gzip
import hashlib
import itertools
import json
import math
import pathlib
import platform
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from etils import epath

from lm.config.configurable import configurable, field
from lm.errors import ConfigError, MismatchError

SPLITS = ('train', 'validation', 'test')
MIN_SHARD_BYTES, MAX_SHARD_BYTES = 1_000_000, 64_000_000


@dataclasses.dataclass(frozen=True)
class Part:
    """A file, or a range of it: of bytes (text, JSON lines) or of records (TFDS)."""

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
    """Where the files hold train and validation alike: the share of the documents that are validation."""

    @property
    def bytes(self) -> int:
        """About how much text it holds."""
        share = {None: 1.0, 'train': 1 - (self.held_out or 0)}.get(self.held_out and self.split, self.held_out or 1)
        return int(share * sum(part.bytes for part in self.parts))


@dataclasses.dataclass(frozen=True)
class Document:
    """A document, or what is wrong with it."""

    id: str
    text: str = ''
    error: str | None = None


class Source(abc.ABC):
    """Base of the sources. Instances are frozen dataclasses and travel to the worker processes."""

    def fetch(self, log) -> None:  # noqa: B027 - most sources have nothing to fetch
        """Downloads what is not there yet, if the source can; `log(line)` tells people."""

    def identity(self) -> dict[str, Any]:
        """What dataset.json says about the source; two preparations with equal identities read the same text."""
        return {'kind': self.gin_name} | dataclasses.asdict(self)

    @abc.abstractmethod
    def splits(self) -> tuple[str, ...]:
        """The names of the splits. Raises ConfigError if there is no data."""

    @abc.abstractmethod
    def shards(self, split: str) -> list[Shard]:
        """The shards of a split in order."""

    @abc.abstractmethod
    def read(self, shard: Shard, max_bytes: int) -> Iterator[Document]:
        """The documents of a shard in order; those longer than `max_bytes` come as errors, unread."""


@configurable('text_files')
class TextFiles(Source):
    """A folder of .txt files, one document each.

    Folders train/, validation/ and test/ in it are the splits: PG-19's own layout (its metadata.csv is not needed).
    Otherwise a share of the files, by a hash of their names, is held out for validation; of a single file its end.
    """

    path: str = field(help='a folder of .txt files, or one that holds train/ validation/ test/')
    validation_fraction: float = field(0.05, above=0, below=1, help='of a folder without folders for the splits')

    def identity(self) -> dict[str, Any]:
        return super().identity() | ({'layout': 'pg19'} if (open_path(self.path) / 'metadata.csv').exists() else {})

    def splits(self) -> tuple[str, ...]:
        folder = _existing(self.path, 'text_files.path', 'a folder of .txt files')
        return tuple(s for s in SPLITS if (folder / s).is_dir()) or ('train', 'validation')

    def shards(self, split: str) -> list[Shard]:
        folder = _existing(self.path, 'text_files.path', 'a folder of .txt files')
        if (folder / split).is_dir():
            return group(split, _whole_files(folder, _find(folder / split, '.txt'), self.path))
        parts = _whole_files(folder, _find(folder, '.txt'), self.path)
        if len(parts) == 1:
            return group(split, [_end_of_file(folder, parts[0], self.validation_fraction, split)])
        return group(split, _by_hash(parts, self.validation_fraction, split))

    def read(self, shard: Shard, max_bytes: int) -> Iterator[Document]:
        return _read_files(open_path(self.path), shard, max_bytes)


@configurable('python_sources')
class PythonSources(Source):
    """The .py files of this Python's standard library: real text that every machine has.

    Without installed packages, tests (not every distribution has them) and files that belong to the machine.
    """

    validation_fraction: float = field(0.05, above=0, below=1, help='of the files')

    def identity(self) -> dict[str, Any]:
        return super().identity() | {'version': platform.python_version()}

    def splits(self) -> tuple[str, ...]:
        return 'train', 'validation'

    def shards(self, split: str) -> list[Shard]:
        folder = self._folder()
        skipped = {'site-packages', 'dist-packages', 'test', 'tests', 'idle_test'}
        files = [
            path
            for path in _find(folder, '.py')
            if not skipped & set(path.relative_to(folder).parts)
            and not path.name.startswith(('_sysconfigdata', 'sitecustomize'))
            and not any(part.startswith('config-') for part in path.parts)
            and _size(path)
        ]
        parts = _whole_files(folder, files, str(folder))
        return group(split, _by_hash(parts, self.validation_fraction, split))

    def read(self, shard: Shard, max_bytes: int) -> Iterator[Document]:
        return _read_files(self._folder(), shard, max_bytes)

    def _folder(self) -> pathlib.Path:
        return pathlib.Path(sysconfig.get_paths()['stdlib'])


@configurable('jsonl')
class Jsonl(Source):
    """JSON lines, one document each, plain or gzipped.

    `path` is a folder with files {split}.jsonl[.gz] or {split}-….jsonl[.gz]; or a pattern that says where the split's
    name stands, such as 'c4/en/c4-{split}.*.json.gz'; or one file or a pattern without {split}, of whose documents a
    share, chosen by a hash of their places, is held out for validation.
    """

    path: str = field(help="a file, a folder of {split}.jsonl[.gz], or a pattern with * and possibly '{split}'")
    text_field: str = field('text', help='the key that holds the text')
    validation_fraction: float = field(0.05, above=0, below=1, help='of files that belong to no split')

    def splits(self) -> tuple[str, ...]:
        found = tuple(s for s in SPLITS if self._files(s))
        if found and self._by_split():
            return found
        if not self._files('train'):
            raise ConfigError(
                f'jsonl.path = {self.path!r}: no such files; name a file, a folder of {{split}}.jsonl or a pattern'
            )
        return 'train', 'validation'

    def shards(self, split: str) -> list[Shard]:
        files, parts = self._files(split), []
        unit = shard_bytes(sum(map(_size, files)))
        for path in files:
            size, packed = _size(path), path.name.endswith('.gz')
            if packed:  # can only be read from its beginning; text is about three times as long
                parts.append(Part(str(path), 0, -1, 3 * size))
                continue
            cuts = [*range(0, size, unit), size]
            parts += [Part(str(path), a, b, b - a) for a, b in itertools.pairwise(cuts)]
        return group(split, parts, None if self._by_split() else self.validation_fraction)

    def read(self, shard: Shard, max_bytes: int) -> Iterator[Document]:
        for part in shard.parts:
            name = part.file.rsplit('/', 1)[-1]
            for offset, line in _lines(part, max_bytes):
                held_out = shard.held_out is not None and _hash(f'{name}@{offset}') < shard.held_out
                if shard.held_out is not None and held_out != (shard.split == 'validation'):
                    continue
                identifier = f'{part.file}@{offset}'
                if line is None:
                    yield Document(identifier, error=f'longer than {max_bytes} bytes')
                elif line.strip():
                    yield self._document(identifier, line)

    def _document(self, identifier: str, line: bytes) -> Document:
        try:
            record = json.loads(line.decode('utf-8'))
        except UnicodeDecodeError:
            return Document(identifier, error='invalid UTF-8')
        except (ValueError, RecursionError):
            return Document(identifier, error='invalid JSON')
        text = record.get(self.text_field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            return Document(identifier, error=f'no text in field {self.text_field!r}')
        return Document(identifier, text)

    def _by_split(self) -> bool:
        return '{split}' in self.path or open_path(self.path).is_dir()

    def _files(self, split: str) -> list[Any]:
        path = open_path(self.path.replace('{split}', split))
        if path.is_dir() and '{split}' not in self.path:
            patterns = [f'{split}{rest}.jsonl{packed}' for rest in ('', '-*', '.*') for packed in ('', '.gz')]
            return sorted({file for pattern in patterns for file in path.glob(pattern)})
        if '*' in str(path) or '?' in str(path):
            folder, pattern = _fixed_folder(path)
            return sorted(file for file in folder.glob(pattern) if not file.is_dir()) if folder.exists() else []
        return [path] if path.exists() else []


def group(split: str, parts: list[Part], held_out: float | None = None) -> list[Shard]:
    """Consecutive parts as shards."""
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
    """A good size of a shard: about 256 of them, of 1 to 64 MB."""
    return min(MAX_SHARD_BYTES, max(MIN_SHARD_BYTES, total // 256))


def open_path(path: str) -> Any:
    """A pathlib path, or what epath has for a bucket, which has no `**` patterns."""
    return epath.Path(path) if '://' in path else pathlib.Path(path).expanduser()


def _find(folder: Any, suffix: str) -> list[Any]:
    """The files of a folder, of the folders in it too unless it is a bucket, by name."""
    return sorted(folder.glob(f'**/*{suffix}' if isinstance(folder, pathlib.Path) else f'*{suffix}'))


def _size(path: Any) -> int:
    stat = path.stat()
    return stat.st_size if hasattr(stat, 'st_size') else stat.length


def _existing(path: str, label: str, wanted: str) -> Any:
    folder = open_path(path)
    if not folder.is_dir():
        raise ConfigError(f'{label} = {path!r}: no such folder; name {wanted}')
    return folder


def _fixed_folder(path: Any) -> tuple[Any, str]:
    """The part of a pattern before its first wildcard, and the rest."""
    fixed = path
    while any(sign in str(fixed) for sign in '*?['):
        fixed = fixed.parent
    return fixed, str(path.relative_to(fixed))


def _whole_files(folder: Any, files: Iterable[Any], label: str) -> list[Part]:
    parts = []
    for path in files:
        size = _size(path)
        parts.append(Part(path.relative_to(folder).as_posix(), 0, size, size))
    if not parts:
        raise ConfigError(f'no .txt or .py files under {label!r}; name the folder that holds them')
    return parts


def _hash(name: str) -> float:
    """Uniform in [0, 1)."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], 'big') / 2**48


def _by_hash(parts: list[Part], fraction: float, split: str) -> list[Part]:
    count = max(1, round(fraction * len(parts)))
    held_out = {part.file for part in sorted(parts, key=lambda part: _hash(part.file))[:count]}
    return [part for part in parts if (part.file in held_out) == (split == 'validation')]


def _end_of_file(folder: Any, part: Part, fraction: float, split: str) -> Part:
    """The file up to the line break before its last `fraction`, or what comes behind that."""
    cut = part.stop - max(1, math.ceil(fraction * part.stop))
    with (folder / part.file).open('rb') as file:
        file.seek(cut)
        cut += len(file.readline())
    cut = cut if cut < part.stop else part.stop
    start, stop = (0, cut) if split == 'train' else (cut, part.stop)
    return Part(part.file, start, stop, stop - start)


def _read_files(folder: Any, shard: Shard, max_bytes: int) -> Iterator[Document]:
    for part in shard.parts:
        if part.stop - part.start > max_bytes:
            yield Document(part.file, error=f'longer than {max_bytes} bytes')
            continue
        try:
            with (folder / part.file).open('rb') as file:
                file.seek(part.start)
                content = file.read(part.stop - part.start)
        except OSError as error:
            raise MismatchError(
                f'{folder / part.file}: {error.strerror or error}; the source changed or cannot be read'
            ) from None
        try:
            yield Document(part.file, content.decode('utf-8'))
        except UnicodeDecodeError:
            yield Document(part.file, error='invalid UTF-8')


def _lines(part: Part, max_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Offset and content of each line that begins in the part; None for content longer than `max_bytes`."""
    with open_path(part.file).open('rb') as file:
        packed = part.file.endswith('.gz')
        stream: BinaryIO = gzip.GzipFile(fileobj=file) if packed else file
        offset = part.start
        if offset:  # the line that crosses the beginning belongs to the part before
            stream.seek(offset - 1)
            offset += _skip_line(stream, -1)
        while packed or offset < part.stop:
            try:
                line = stream.readline(max_bytes + 1)
                length = len(line)
                whole = length <= max_bytes or line.endswith(b'\n')
                if not whole:
                    length = _skip_line(stream, length)
            except (EOFError, zlib.error, gzip.BadGzipFile, OSError) as error:
                raise MismatchError(
                    f'{part.file}: damaged behind byte {offset} ({error}); fetch the file again'
                ) from None
            if not line:
                return
            yield offset, line if whole else None
            offset += length


def _skip_line(stream: BinaryIO, length: int) -> int:
    """Reads to the end of the line in pieces; returns `length` plus what was read."""
    while piece := stream.readline(1_000_000):
        length += len(piece)
        if piece.endswith(b'\n'):
            break
    return length
