"""Windows of a local token store whose chunks lie in the page cache: read without the threads of TensorStore.

TensorStore spends more time per window on threads than memory needs for its bytes. These reads wait for a disk a few
times per call at most, and report nothing. Where more chunks are not in the page cache, TensorStore reads all of them
at once. It also reads what is not as `lm prepare` writes it, and names what is wrong. The checksum (crc32c) of each
chunk is compared on each read. Files: zarr3, codec `sharding_indexed`, the index behind the chunks.
"""

import contextlib
import dataclasses
import os
import sys
import threading
from collections.abc import Sequence

import google_crc32c
import numpy as np

CRC_BYTES = 4
MOST_ELEMENTS = 2**20
"""A call for more gains nothing."""
MOST_WAITS = 4
"""Chunks of a call that may come from a disk: a busy machine drops single ones from the page cache."""
NO_WAIT = getattr(os, 'RWF_NOWAIT', None) if sys.byteorder == 'little' else None
"""Makes a read fail where it would wait; only Linux has it. Files and memory have one order of bytes."""


@dataclasses.dataclass
class CachedArray:
    """One array of a store on this machine.

    Attributes:
        folder: has the files of the array, named by their numbers.
        dtype: of the elements.
        chunk: elements in a chunk.
        shard: elements in a file, a multiple of `chunk`.
        most_indexes: the number of files whose indexes are kept in memory.
    """

    folder: str
    dtype: np.dtype
    chunk: int
    shard: int
    most_indexes: int

    def __post_init__(self):
        self._indexes: dict[tuple[int, ...], memoryview] = {}
        self._lock = threading.Lock()

    def read(self, starts: Sequence[int], length: int) -> np.ndarray | None:
        """Reads windows [N, length] that begin at `starts` and lie inside the array; None: TensorStore has to."""
        if NO_WAIT is None or not 0 < len(starts) * length <= MOST_ELEMENTS:
            return None
        windows = np.empty((len(starts), length), self.dtype)
        files: dict[int, tuple[int, memoryview]] = {}
        try:
            is_read = self._fill(windows, files, starts)
        except (OSError, OverflowError, _Damaged):
            is_read = False
        finally:
            for file, _ in files.values():
                with contextlib.suppress(OSError):
                    os.close(file)
        return windows if is_read else None

    def _fill(self, windows_NxL: np.ndarray, files: dict[int, tuple[int, memoryview]], starts: Sequence[int]) -> bool:
        """Fills the windows, and returns whether it could; adds the files that it opens, with their indexes."""
        chunk, length, per_file = self.chunk, windows_NxL.shape[1], self.shard // self.chunk
        # One chunk at a time, in a buffer that stays in the processor's cache.
        size = chunk * self.dtype.itemsize
        whole = np.empty(size + CRC_BYTES, np.uint8)
        content, crc, elements = whole[:size], whole[size:].data.cast('I'), whole[:size].view(self.dtype)
        buffers, stored, flags, waits, newest = [whole.data], size + CRC_BYTES, NO_WAIT or 0, MOST_WAITS, None
        # In the order of the chunks: windows of one chunk share its read.
        pieces = sorted(
            (number, row, start - number * chunk)
            for row, start in enumerate(starts)
            for number in range(start // chunk, (start + length - 1) // chunk + 1)
        )
        for number, row, start in pieces:
            if number != newest:
                which, place = divmod(number, per_file)
                if which not in files:
                    files[which] = self._open_file(which)
                file, index = files[which]
                if index[2 * place + 1] != stored:
                    return False
                try:
                    found = os.preadv(file, buffers, index[2 * place], flags)
                except BlockingIOError:
                    found = 0
                if found != stored:
                    waits -= 1
                    if waits < 0 or os.preadv(file, buffers, index[2 * place]) != stored:
                        return False
                if google_crc32c.value(content) != crc[0]:
                    return False
                newest = number
            # The first element of the window would be element `start` of this chunk.
            if start >= 0 and start + length <= chunk:
                windows_NxL[row] = elements[start : start + length]
            else:
                first, last = max(0, start), min(chunk, start + length)
                windows_NxL[row, first - start : last - start] = elements[first:last]
        return True

    def _open_file(self, number: int) -> tuple[int, memoryview]:
        """Opens a file, and returns its descriptor with its index: offset and bytes of each chunk, one after another,
        uint64. Raises OSError or _Damaged."""
        file = os.open(os.path.join(self.folder, str(number)), os.O_RDONLY | os.O_CLOEXEC)
        try:
            return file, self._read_index(file)
        except BaseException:
            os.close(file)
            raise

    def _read_index(self, file: int) -> memoryview:
        """Returns the index of an open file (`_open_file`). Raises _Damaged."""
        status = os.fstat(file)
        identity = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
        index = self._indexes.get(identity)
        if index is None:
            size = 16 * (self.shard // self.chunk)
            content = os.pread(file, size + CRC_BYTES, max(0, status.st_size - size - CRC_BYTES))
            entries = content[:size]
            if google_crc32c.value(entries).to_bytes(CRC_BYTES, 'little') != content[size:]:
                raise _Damaged
            index = memoryview(entries).cast('Q')
            with self._lock:
                while len(self._indexes) >= self.most_indexes:
                    del self._indexes[next(iter(self._indexes))]
                self._indexes[identity] = index
        return index


class _Damaged(Exception):
    """An index does not have its checksum."""
