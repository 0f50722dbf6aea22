"""Sources of folders with one document per file."""

import abc
import collections
import contextlib
import functools
import hashlib
import math
import pathlib
from collections.abc import Iterator
from typing import ClassVar

from lm.config.configurable import configurable_base, field
from lm.data.sources.base import HELD_OUT_BY, Document, Part, Shard, Source, decode, group, hash_of, regular, too_long
from lm.errors import ConfigError, MismatchError
from lm.files import AnyPath, file_size


@configurable_base
class Folder(Source):
    """Base of the sources that read a folder of files, one document each.

    A share of the files, by a hash of their names, is held out for validation; of a single file its end. Copies of a
    file go where the first of them goes.
    """

    validation_fraction: float = field(default=0.05, above=0, below=1, help='of files that belong to no split')

    suffix: ClassVar[str]
    """The end of the names of the files that are read, such as '.txt'."""

    @abc.abstractmethod
    def folder(self) -> AnyPath:
        """Returns the folder as a path. Raises ConfigError if there is none."""

    @abc.abstractmethod
    def files(self, split: str) -> tuple[list[AnyPath], bool]:
        """Returns the files with the documents of `split`, and whether they hold both train and validation."""

    def find(self, folder: AnyPath) -> list[AnyPath]:
        """Returns the files under a folder in the order of their names."""
        if isinstance(folder, pathlib.Path):
            return regular(path for path in walk(folder) if path.name.endswith(self.suffix))
        return sorted(path for path in walk_bucket(folder, self.suffix) if path.name.endswith(self.suffix))

    def name_of(self, path: AnyPath, folder: AnyPath) -> str:
        """Returns the name of the document in a file."""
        return path.relative_to(folder).as_posix()

    def path_of(self, name: str, folder: AnyPath) -> AnyPath:
        """Returns the file of the document with this name."""
        return folder / name

    def identity(self) -> dict[str, object]:
        return super().identity() | ({} if self.by_place else {HELD_OUT_BY: 'text'})

    def splits(self) -> tuple[str, ...]:
        return 'train', 'validation'

    def shards(self, split: str) -> list[Shard]:
        folder = self.folder()
        files, shared = self.files(split)
        parts = []
        for path in files:
            size = file_size(path)
            parts.append(Part(self.name_of(path, folder), 0, size, size))
        if not parts:
            raise ConfigError(f'no {self.suffix} files under {str(folder)!r}; name the folder that holds them')
        if shared and len(parts) == 1:
            parts = [_end_of_file(self.path_of(parts[0].file, folder), parts[0], self.validation_fraction, split)]
        elif shared:
            held_out = self._choose_held_out(parts)
            parts = [part for part in parts if (part.file in held_out) == (split == 'validation')]
        return group(split, parts)

    def _choose_held_out(self, parts: list[Part]) -> set[str]:
        """Returns the files for validation. Raises ConfigError if all files are copies of one."""
        copies: dict[str, list[str]] = collections.defaultdict(list)
        firsts = {} if self.by_place else self._firsts
        for part in parts:
            copies[firsts.get(part.file, part.file)].append(part.file)
        if len(copies) == 1:
            raise ConfigError(
                f'{self.gin_name}.validation_fraction = {self.validation_fraction:g}: all {len(parts)} files are '
                "copies of one, and copies stay together; add others, or files for the split 'validation'"
            )
        count, held_out = round(self.validation_fraction * len(parts)), set()
        groups = [copies[first] for first in sorted(copies, key=hash_of)]
        for files in groups:
            if len(held_out) + len(files) <= min(count, len(parts) - 1):
                held_out.update(files)
        return held_out or set(min(groups, key=len))

    @functools.cached_property
    def _firsts(self) -> dict[str, str]:
        """File that has copies → the first of them. Only files of one size are read."""
        folder, sizes, known, found = self.folder(), collections.defaultdict(list), {}, {}
        for path in self.files('train')[0]:
            sizes[file_size(path)].append(path)
        for path in (path for paths in sizes.values() if len(paths) > 1 for path in paths):
            name = self.name_of(path, folder)
            with _reading(path), path.open('rb') as file:
                first = known.setdefault(hashlib.file_digest(file, 'sha256').digest(), name)
            if first != name:
                found |= {name: first, first: first}
        return found

    def read(self, shard: Shard, max_bytes: int) -> Iterator[Document]:
        folder = self.folder()
        for part in shard.parts:
            if part.stop - part.start > max_bytes:
                yield too_long(part.file, max_bytes)
                continue
            path = self.path_of(part.file, folder)
            with _reading(path), path.open('rb') as file:
                file.seek(part.start)
                content = file.read(part.stop - part.start)
            yield decode(part.file, content, max_bytes)


def walk(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the files under a folder, and the folders that are not entered. Links to folders are followed.

    A folder is entered once, however many links lead to it. So no link makes a circle, and no document comes twice. A
    folder that cannot be read is not entered, and neither is one around `folder`.
    """
    around = {_identify(path) for path in folder.resolve().parents}
    entered: set[tuple[int, int]] = set()
    folders, links = [folder], []
    while folders or links:
        # Links come last: they change no name that a document has without them.
        current = folders.pop() if folders else links.pop(0)
        try:
            identity = _identify(current)
            inside = [] if identity in entered or identity in around else sorted(current.iterdir())
            paths = [(path, path.is_dir()) for path in inside]
        except OSError:
            yield current
            continue
        if identity in around:
            yield current
        entered.add(identity)
        for path, is_folder in paths:
            if is_folder:
                (links if path.is_symlink() else folders).append(path)
            else:
                yield path


def walk_bucket(folder: AnyPath, suffix: str) -> Iterator[AnyPath]:
    """Yields the files under a folder of a bucket. What ends in `suffix` is one: asking would take a request each."""
    for path in folder.iterdir():
        if not path.name.endswith(suffix) and path.is_dir():
            yield from walk_bucket(path, suffix)
        else:
            yield path


def _identify(path: pathlib.Path) -> tuple[int, int]:
    """Returns device and inode of a folder, which are the same by every name."""
    found = path.stat()
    return found.st_dev, found.st_ino


@contextlib.contextmanager
def _reading(path: AnyPath) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MismatchError(f'{path}: {error.strerror or error}; the source changed or cannot be read') from None


def _end_of_file(path: AnyPath, part: Part, fraction: float, split: str) -> Part:
    """Returns the file up to the first line break in its last `fraction`, or the rest, for validation.

    Where no line ends there, the first space counts; without a space, the first character.
    """
    cut = max(0, part.stop - max(1, math.ceil(fraction * part.stop)))
    with path.open('rb') as file:
        file.seek(cut)
        line = file.readline()
    if cut + len(line) < part.stop:
        cut += len(line)
    elif 0 <= (space := line.find(b' ')) < len(line) - 1:
        cut += space + 1
    else:
        cut += next((i for i, byte in enumerate(line) if byte & 0b1100_0000 != 0b1000_0000), 0)
    start, stop = (0, cut) if split == 'train' else (cut, part.stop)
    return Part(part.file, start, stop, stop - start)
