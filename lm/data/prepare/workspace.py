"""Where the intermediate files of a preparation lie: here in a folder of this machine."""

import abc
import dataclasses
import pathlib

import numpy as np

from lm.files import write_atomically

Content = bytes | list[np.ndarray]


class Workspace(abc.ABC):
    """Files by name. A file appears whole or not at all."""

    @abc.abstractmethod
    def read(self, name: str, span: slice | None = None) -> bytes | None:
        """Returns the contents of a file, or only the bytes of `span`; None where there is no file."""

    @abc.abstractmethod
    def write(self, name: str, content: Content) -> int:
        """Writes a file and returns its size in bytes."""

    @abc.abstractmethod
    def remove(self, name: str) -> None:
        """Deletes a file, if it is there."""

    def write_first(self, name: str, content: bytes) -> None:
        """Writes a file that no other process writes otherwise."""
        self.write(name, content)

    @abc.abstractmethod
    def is_whole(self, name: str, size: int) -> bool:
        """Returns whether a file of this size is there, as far as a look at its name and size can tell."""


@dataclasses.dataclass(frozen=True)
class LocalFolder(Workspace):
    """A folder of this machine that no other machine uses."""

    path: pathlib.Path

    def read(self, name: str, span: slice | None = None) -> bytes | None:
        try:
            content = (self.path / name).read_bytes()
        except FileNotFoundError:
            return None
        return content if span is None else content[span]

    def write(self, name: str, content: Content) -> int:
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        return write_atomically(self.path / name, content)

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def is_whole(self, name: str, size: int) -> bool:
        try:
            return (self.path / name).stat().st_size == size
        except OSError:
            return False


class MemoryFolder(Workspace):
    """Files in the memory of this process."""

    def __init__(self):
        self._files: dict[str, bytes] = {}

    def read(self, name: str, span: slice | None = None) -> bytes | None:
        content = self._files.get(name)
        return content if content is None or span is None else content[span]

    def write(self, name: str, content: Content) -> int:
        self._files[name] = content if isinstance(content, bytes) else b''.join(part.data for part in content)
        return len(self._files[name])

    def remove(self, name: str) -> None:
        self._files.pop(name, None)

    def is_whole(self, name: str, size: int) -> bool:
        return len(self._files.get(name, b'')) == size
