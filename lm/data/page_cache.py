"""Windows of a local token store whose chunks lie in the page cache: read without the threads of TensorStore.

TensorStore spends more time per window on threads than memory needs for its bytes. These reads wait for a disk a few
times per call at most, and report nothing. Where more chunks are not in the page cache, TensorStore reads all of them
at once. It also reads what is not as `lm prepare` writes it, and names what is wrong. Files: zarr3, codec
`sharding_indexed`, the index behind the chunks.

The checksum (crc32c) of a chunk is compared before its first element is used. Later reads take from the chunk only what
they need, until the file changes or one of its chunks has left the page cache: what a disk gives is checked again.
"""

import dataclasses
import itertools
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import google_crc32c
import numpy as np

CRC_BYTES = 4
MOST_ELEMENTS = 2**20
"""A call for more gains nothing."""
MOST_WAITS = 4
"""Chunks of a call that may come from a disk: a busy machine drops single ones from the page cache."""
NO_WAIT = getattr(os, 'RWF_NOWAIT', None) if sys.byteorder == 'little' else None
"""Makes a read fail where it would wait; only Linux has it. Files and memory have one order of bytes."""


class _File(NamedTuple):
    """An open file.

    Attributes:
        descriptor: for reads.
        index: offset and bytes of each chunk, one after another, uint64.
        checked: a byte per chunk: 1 where its checksum has been compared.
    """

    descriptor: int
    index: memoryview
    checked: bytearray


_Files = dict[int, _File]


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
        self._files: dict[tuple[int, ...], tuple[memoryview, bytearray]] = {}
        self._lock = threading.Lock()

    def read(self, starts: Sequence[int], length: int) -> np.ndarray | None:
        """Reads windows [N, length] that begin at `starts` and lie inside the array; None: TensorStore has to."""
        if NO_WAIT is None or not 0 < len(starts) * length <= MOST_ELEMENTS:
            return None
        windows = np.empty((len(starts), length), self.dtype)
        files: _Files = {}
        try:
            try:
                return windows if self._fill(windows, files, starts) else None
            finally:
                for file in files.values():
                    os.close(file.descriptor)
        except (OSError, OverflowError, _Damaged):
            return None

    def _fill(self, windows_NxL: np.ndarray, files: _Files, starts: Sequence[int]) -> bool:
        """Fills the windows, and returns whether it could; adds the files that it opens."""
        chunk, length, per_file = self.chunk, windows_NxL.shape[1], self.shard // self.chunk
        rest = list(enumerate(starts))
        # Windows that lie closer than chunks share reads of whole chunks.
        if max(starts) - min(starts) >= (len(starts) - 1) * chunk:
            rest = [(row, start) for row, start in rest if not self._fill_checked(windows_NxL[row], files, start)]
        if not rest:
            return True
        # One chunk at a time, in a buffer that stays in the processor's cache.
        size = chunk * self.dtype.itemsize
        whole = np.empty(size + CRC_BYTES, np.uint8)
        content, crc, elements = whole[:size], whole[size:].data.cast('I'), whole[:size].view(self.dtype)
        buffers, stored, waits, newest = [whole.data], size + CRC_BYTES, MOST_WAITS, None
        # In the order of the chunks: windows of one chunk share its read.
        pieces = sorted(
            (number, row, start - number * chunk)
            for row, start in rest
            for number in range(start // chunk, (start + length - 1) // chunk + 1)
        )
        for number, row, start in pieces:
            if number != newest:
                which, place = divmod(number, per_file)
                file, index, checked = files.get(which) or self._open_file(files, which)
                if index[2 * place + 1] != stored:
                    return False
                if _read_at_once(file, buffers, index[2 * place]) != stored:
                    checked[:] = bytes(per_file)
                    waits -= 1
                    if waits < 0 or os.preadv(file, buffers, index[2 * place]) != stored:
                        return False
                if google_crc32c.value(content) != crc[0]:
                    return False
                checked[place], newest = 1, number
            # The first element of the window would be element `start` of this chunk.
            if start >= 0 and start + length <= chunk:
                windows_NxL[row] = elements[start : start + length]
            else:
                first, last = max(0, start), min(chunk, start + length)
                windows_NxL[row, first - start : last - start] = elements[first:last]
        return True

    def _fill_checked(self, window_L: np.ndarray, files: _Files, start: int) -> bool:
        """Fills a window from checked chunks in a row that are in the page cache, and returns whether it could."""
        length, width = len(window_L), self.dtype.itemsize
        which, first = divmod(start, self.shard)
        place, begin = divmod(first, self.chunk)
        gaps = (begin + length - 1) // self.chunk
        file, index, checked = files.get(which) or self._open_file(files, which)
        if not all(checked[place : place + gaps + 1]) or first + length > self.shard:
            return False
        offset, buffers = index[2 * place], [window_L]
        if gaps:
            if index[2 * (place + gaps)] - offset != gaps * (self.chunk * width + CRC_BYTES):
                return False
            ends = [0, *range(self.chunk - begin, length, self.chunk), length]
            checksum = bytearray(CRC_BYTES)
            parts = [part for a, b in itertools.pairwise(ends) for part in (window_L[a:b], checksum)]
            buffers = parts[:-1]
        if _read_at_once(file, buffers, offset + begin * width) == length * width + gaps * CRC_BYTES:
            return True
        checked[:] = bytes(len(checked))
        return False

    def _open_file(self, files: _Files, number: int) -> _File:
        """Opens a file, and adds it to `files`. Raises OSError or _Damaged."""
        file = os.open(f'{self.folder}/{number}', os.O_RDONLY | os.O_CLOEXEC)
        try:
            files[number] = _File(file, *self._read_index(file))
        except BaseException:
            os.close(file)
            raise
        return files[number]

    def _read_index(self, file: int) -> tuple[memoryview, bytearray]:
        """Returns the index and the checked chunks of an open file. Raises _Damaged."""
        status = os.fstat(file)
        identity = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        known = self._files.get(identity)
        if known is None:
            chunks = self.shard // self.chunk
            size = 16 * chunks
            content = os.pread(file, size + CRC_BYTES, max(0, status.st_size - size - CRC_BYTES))
            entries = content[:size]
            if google_crc32c.value(entries).to_bytes(CRC_BYTES, 'little') != content[size:]:
                raise _Damaged
            known = memoryview(entries).cast('Q'), bytearray(chunks)
            with self._lock:
                while len(self._files) >= self.most_indexes:
                    del self._files[next(iter(self._files))]
                self._files[identity] = known
        return known


def _read_at_once(file: int, buffers: list[Any], offset: int) -> int:
    """Reads into the buffers, and returns the bytes that were in the page cache; 0: a read would have waited."""
    try:
        return os.preadv(file, buffers, offset, NO_WAIT or 0)
    except BlockingIOError:
        return 0


class _Damaged(Exception):
    """An index does not have its checksum."""
