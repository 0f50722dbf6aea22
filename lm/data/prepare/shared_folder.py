"""The folder of the intermediate files, which lie beside the store. Many machines and processes use it together."""

import collections
import dataclasses
import functools
import pathlib
import shutil
from collections.abc import Iterator, Sequence

import numpy as np
import tensorstore as ts

from lm.data import store
from lm.files import is_remote, local_path, write_atomically

AHEAD = 64
"""Reads of small files that are under way together."""


@dataclasses.dataclass(frozen=True)
class SharedFolder:
    """Files by name in a folder or in a bucket: gs://…, s3://… or a path. A file appears whole or not at all."""

    address: str

    @property
    def kvstore(self) -> ts.KvStore:
        return _open(self.address)

    @functools.cached_property
    def _local(self) -> pathlib.Path | None:
        """The folder, if it is one of this machine; None: it is in a bucket.

        Large files of a folder are read and written past TensorStore, which copies them twice more.
        """
        return None if is_remote(self.address) else local_path(self.address)

    def read(self, name: str, span: slice | None = None) -> bytes | None:
        """Returns the contents of a file, or only the bytes of `span`; None where there is no file."""
        return _value(self.kvstore.read(name, byte_range=span).result())

    def read_many(self, names: Sequence[str], ahead: int = AHEAD) -> Iterator[bytes | None]:
        """Yields the contents of files in the order of their names, `ahead` reads from a bucket together."""
        if self._local is not None:
            for name in names:
                try:
                    yield (self._local / name).read_bytes()
                except FileNotFoundError:
                    yield None
            return
        under_way: collections.deque[ts.Future] = collections.deque()
        for name in names:
            under_way.append(self.kvstore.read(name))
            if len(under_way) == ahead:
                yield _value(under_way.popleft().result())
        while under_way:
            yield _value(under_way.popleft().result())

    def write(self, name: str, content: bytes | list[np.ndarray]) -> None:
        if self._local is not None:
            (self._local / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._local / name, content)
        else:
            content = content if isinstance(content, bytes) else b''.join(part.data for part in content)
            self.kvstore.write(name, content).result()

    def remove(self, name: str) -> None:
        """Deletes a file, if it is there."""
        self.kvstore.write(name, None).result()

    def write_first(self, name: str, content: bytes) -> bytes:
        """Writes a file unless it is there, and returns the contents that lie there then.

        Of several machines that write at once, one succeeds, where the storage keeps conditional writes.
        """
        found = self.kvstore.read(name).result()
        if found.state != 'value':
            self.kvstore.write(name, content, if_equal=found.stamp.generation).result()
            found = self.kvstore.read(name).result()
        return found.value

    def list_names(self, folder: str) -> set[str]:
        """Returns the names of the files below a folder, without the folder's name."""
        within = ts.KvStore.KeyRange(f'{folder}/', f'{folder}0')  # 0 is the character behind the slash
        return {key.decode() for key in self.kvstore.list(within, strip_prefix_length=len(folder) + 1).result()}

    def delete(self) -> None:
        """Deletes all files."""
        self.kvstore.delete_range(ts.KvStore.KeyRange()).result()
        if self._local is not None:
            shutil.rmtree(self._local, ignore_errors=True)


@functools.cache
def _open(address: str) -> ts.KvStore:
    return store.open_kvstore(address)


def _value(result: ts.KvStore.ReadResult) -> bytes | None:
    return result.value if result.state == 'value' else None
