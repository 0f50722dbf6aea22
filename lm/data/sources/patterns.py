"""Sources of files with many documents each. A source on this base only reads one part of a file."""

import abc
import collections
import functools
import gzip
import itertools
import zlib
from collections.abc import Iterator
from typing import BinaryIO, ClassVar, cast

from lm.config.configurable import configurable_base, field
from lm.data.sources.base import (
    HELD_OUT_BY,
    SPLITS,
    Document,
    Part,
    Shard,
    Source,
    fraction_of,
    group,
    hash_of,
    regular,
    shard_bytes,
)
from lm.errors import ConfigError, MismatchError
from lm.files import AnyPath, file_size, is_remote, open_source

PACKERS = {
    b'\x1f\x8b': 'gzip',
    b'\x28\xb5\x2f\xfd': 'zstd',
    b'\xfd7zXZ\x00': 'xz',
    b'BZh': 'bzip2',
    b'PK\x03\x04': 'zip',
}
"""The first bytes of packed files, and the program that packs them."""
PACKED = '.gz'
"""The end of the names of gzipped files."""


@configurable_base
class FilePatterns(Source):
    """Base of the sources that read files of many documents.

    `path` is a folder with files {split}SUFFIX, {split}-…SUFFIX or {split}.…SUFFIX; or a pattern of *, ? and [] that
    says where the split's name stands, such as 'c4/en/c4-{split}.*.json.gz'; or one file or a pattern without {split},
    of whose documents a share, chosen by a hash of their texts, is held out for validation. Copies stay together.
    """

    path: str = field(help="a file, a folder of files by split, or a pattern with * and possibly '{split}'")
    validation_fraction: float = field(default=0.05, above=0, below=1, help='of files that belong to no split')

    suffixes: ClassVar[tuple[str, ...]] = ('',)
    """The ends of the names of the files in a folder."""
    below: ClassVar[tuple[str, ...]] = ()
    """Further patterns for the files of a split in a folder."""
    unsplit: ClassVar[tuple[str, ...]] = ()
    """Patterns for files of no split; they count where a folder has no files of splits."""
    aliases: ClassVar[tuple[tuple[str, str], ...]] = tuple(('validation', name) for name in ('valid', 'val', 'dev'))
    """Pairs of a split and another name for it in the names of files."""

    def identity(self) -> dict[str, object]:
        return super().identity() | ({} if self.by_place else {HELD_OUT_BY: 'text'})

    @property
    def how_to_hold_out(self) -> str:
        files = self.path.replace('{split}', 'train')
        if self._open('').is_dir():
            if not (found := self._files('train')):
                return 'add files for validation'
            one = found[0]
            files = f'{one.parent}/{"train*" if one.name.startswith("train") else "*"}'
        share = f'{100 * self.validation_fraction:g} % of the documents'
        return f"add files for validation, or hold out {share} by {self.gin_name}.path = '{files}'"

    def parts(self, path: AnyPath, unit: int) -> list[Part]:
        """Cuts a file into parts of about `unit` bytes of text, if the format allows it; here the file stays whole."""
        return [Part(str(path), 0, -1, file_size(path))]

    @abc.abstractmethod
    def read_part(self, part: Part, max_bytes: int) -> Iterator[Document]:
        """Yields the documents of a part in order. An id is FILE@PLACE, and does not depend on how the file is cut."""

    def splits(self) -> tuple[str, ...]:
        found = tuple(s for s in SPLITS if self._files(s))
        if found and self._by_split():
            return found
        if not self._files('train'):
            there = ', '.join(self.list_unread()[:3])
            raise ConfigError(
                f'{self.gin_name}.path = {self.path!r}: no such files; name a file, a folder of '
                f'{{split}}{self.suffixes[0]} or a pattern' + (f'; the folder holds {there}' if there else '')
            )
        return 'train', 'validation'

    def list_unread(self) -> list[str]:
        folder = self._open('')
        if '{split}' in self.path or not folder.is_dir():
            return []
        read = {path.name for split in SPLITS for path in self._files(split)}
        return sorted(path.name for path in folder.iterdir() if path.name not in read and not path.is_dir())

    def shards(self, split: str) -> list[Shard]:
        files, _ = self._files(split), self._repeated  # which travels with this object, and is not looked for again
        unit = shard_bytes(sum(map(file_size, files)))
        parts = [part for path in files for part in self.parts(path, unit)]
        return group(split, parts, None if self._by_split() else self.validation_fraction)

    def read(self, shard: Shard, max_bytes: int) -> Iterator[Document]:
        share, is_validation = shard.held_out, shard.split == 'validation'
        for part in shard.parts:
            for document in self.read_part(part, max_bytes):
                if share is None or (self._hash(document) < share) == is_validation:
                    yield document

    def _hash(self, document: Document) -> float:
        """Returns a number uniform in [0, 1), which decides whether a document is held out."""
        if self.by_place or document.error:
            return hash_of(self._hashed(document.id))
        return fraction_of(document.digest())

    @functools.cached_property
    def _repeated(self) -> frozenset[str]:
        """The names that several files in different folders have, where a share of the documents is held out."""
        names = [] if self._by_split() else [path.name for path in self._files('train')]
        return frozenset(name for name, count in collections.Counter(names).items() if count > 1)

    def _hashed(self, identifier: str) -> str:
        """Returns the place of a document, NAME@PLACE; with the folders where several files have the name."""
        name = identifier.rsplit('/', 1)[-1]
        if name.rpartition('@')[0] not in self._repeated:
            return name
        return identifier.removeprefix(str(_fixed_folder(self._open('train'))[0]))

    def _open(self, split: str) -> AnyPath:
        return open_source(self.path.replace('{split}', split), f'{self.gin_name}.path')

    def _by_split(self) -> bool:
        return '{split}' in self.path or (self._open('').is_dir() and not self._unsplit())

    def _unsplit(self) -> list[AnyPath]:
        """Returns the files of a folder that has no files of splits."""
        folder = self._open('')
        if not self.unsplit or not folder.is_dir() or any(self._named(name, folder) for name in SPLITS):
            return []
        return regular({file for pattern in self.unsplit for file in folder.glob(pattern)})

    def _named(self, split: str, folder: AnyPath) -> list[AnyPath]:
        """Returns the files of a folder that have the name of the split."""
        patterns = [f'{{split}}{rest}{suffix}' for rest in ('', '-*', '.*') for suffix in self.suffixes]
        found = {file for pattern in (*patterns, *self.below) for file in folder.glob(pattern.format(split=split))}
        return regular(found)

    def _files(self, split: str) -> list[AnyPath]:
        names = [split, *(name for of, name in self.aliases if of == split)]
        found = next((found for name in names if (found := self._files_named(name))), [])
        plain = {str(path) for path in found}
        if twice := [path for path in found if str(path).endswith(PACKED) and str(path)[: -len(PACKED)] in plain]:
            raise ConfigError(
                f'{self.gin_name}.path = {self.path!r}: {twice[0].name} lies there both packed and unpacked; move one '
                'of the two away'
            )
        return found

    def _files_named(self, split: str) -> list[AnyPath]:
        path = self._open(split)
        if path.is_dir() and '{split}' not in self.path:
            return self._named(split, path) or self._unsplit()
        if path.exists() or not _is_pattern(path):
            return regular([path] if path.exists() else [])
        folder, pattern = _fixed_folder(path)
        try:
            return regular(folder.glob(pattern) if folder.exists() else [])
        except (ValueError, NotImplementedError) as error:
            reason = ' '.join(str(error).split())[:150]
            raise ConfigError(f'{self.gin_name}.path = {self.path!r}: {reason}; write another pattern') from None


class LinePatterns(FilePatterns):
    """Base of the sources that read files of lines, plain or gzipped."""

    def shards(self, split: str) -> list[Shard]:
        files = self._files(split)
        for path in files[:1] if is_remote(self.path) else files:  # each look into a bucket takes a moment
            with path.open('rb') as file:
                if wrong := self.explain_form(file.read(4096), path.name):
                    raise ConfigError(f'{self.gin_name}.path = {self.path!r}: {path.name} {wrong}')
        return super().shards(split)

    def explain_form(self, head: bytes, name: str) -> str | None:
        """Returns why a file that begins with `head` is none of lines, and the remedy; None: it may be one."""
        packer = next((packer for magic, packer in PACKERS.items() if head.startswith(magic)), None)
        if packer == 'gzip':
            return None if name.endswith(PACKED) else f'is packed with gzip; give it a name that ends in {PACKED}'
        return packer and f'is packed with {packer}, which is not read; unpack it, or pack it with gzip'

    def parts(self, path: AnyPath, unit: int) -> list[Part]:
        size = file_size(path)
        if path.name.endswith(PACKED):
            if not size:
                raise MismatchError(f'{path}: empty, without even the head of a gzip file; fetch it again')
            # Can only be read from its beginning; text is about three times as long.
            return [Part(str(path), 0, -1, 3 * size)]
        return [Part(str(path), a, b, b - a) for a, b in itertools.pairwise([*range(0, size, unit), size])]


def lines(part: Part, stop: int, max_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Yields offset and content of each line that begins in the part and before `stop`.

    `stop` = -1 is the end of the file; gzipped files are always read to the end. Content longer than `max_bytes` is
    None.
    """
    with open_source(part.file).open('rb') as file:
        to_end = part.file.endswith(PACKED) or stop < 0
        # GzipFile has all methods of a BinaryIO but does not declare it.
        stream = cast(BinaryIO, gzip.GzipFile(fileobj=file) if part.file.endswith(PACKED) else file)
        offset = part.start
        if offset:  # the line that crosses the beginning belongs to the part before
            stream.seek(offset - 1)
            offset += _skip_line(stream, -1)
        while to_end or offset < stop:
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
    """Reads to the end of the line in pieces. Returns `length` plus the number of bytes."""
    while piece := stream.readline(1_000_000):
        length += len(piece)
        if piece.endswith(b'\n'):
            break
    return length


def _is_pattern(path: AnyPath) -> bool:
    return any(sign in str(path) for sign in '*?[')


def _fixed_folder(path: AnyPath) -> tuple[AnyPath, str]:
    """Returns the part of a pattern before its first wildcard, and the rest. Existing folders have no wildcard."""
    fixed = path.parent
    while _is_pattern(fixed) and not fixed.exists():
        fixed = fixed.parent
    return fixed, str(path.relative_to(fixed))
