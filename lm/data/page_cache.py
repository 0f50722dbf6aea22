"""Windows of a local token store whose chunks lie in the page cache: read without the threads of TensorStore.

TensorStore spends more time per window on threads than memory needs for its bytes. These reads wait for a disk a few
times per call at most, and report nothing. Where more chunks are not in the page cache, TensorStore reads all of them
at once. It also reads what is not as `lm prepare` writes it, and names what is wrong. The checksum (crc32c) of each
chunk is compared on each read. Files: zarr3, codec `sharding_indexed`, the index behind the chunks.
"""

import contextlib
import dataclasses
import os
import threading
from collections.abc import Iterator

import google_crc32c
import numpy as np

CRC_BYTES = 4
MOST_ELEMENTS = 2**20
"""A call for more gains nothing."""
MOST_WAITS = 4
"""Chunks of a call that may come from a disk: a busy machine drops single ones from the page cache."""
NO_WAIT = getattr(os, 'RWF_NOWAIT', None)
"""Makes a read fail where it would wait; only Linux has it."""


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
        self._indexes: dict[tuple[int, ...], np.ndarray] = {}
        self._lock = threading.Lock()

    def read(self, starts_N: np.ndarray, length: int) -> np.ndarray | None:
        """Reads windows [N, length] that begin at `starts_N` and lie inside the array; None: TensorStore has to."""
        if NO_WAIT is None or not 0 < len(starts_N) * length <= MOST_ELEMENTS:
            return None
        windows = np.empty((len(starts_N), length), self.dtype)
        size = self.chunk * self.dtype.itemsize
        # One chunk at a time, in a buffer that stays in the processor's cache.
        whole = np.empty(size + CRC_BYTES, np.uint8)
        content, crc, elements = whole[:size], whole[size:].view('<u4'), whole[:size].view(self.dtype)
        newest, per_file, buffers, waits = None, self.shard // self.chunk, [whole.data], MOST_WAITS
        try:
            with contextlib.ExitStack() as stack:
                files: dict[int, tuple[int, np.ndarray]] = {}
                for number, row, start in self._find_pieces(starts_N, length):
                    if number != newest:
                        which, place = divmod(number, per_file)
                        if which not in files:
                            file = stack.enter_context(open_file(os.path.join(self.folder, str(which))))
                            files[which] = file, self._read_index(file)
                        file, index = files[which]
                        offset, stored = index[place].tolist()
                        if stored != len(whole):
                            return None
                        if not _read_at_once(file, buffers, offset, stored):
                            waits -= 1
                            if waits < 0 or os.preadv(file, buffers, offset) != stored:
                                return None
                        if google_crc32c.value(content) != crc[0]:
                            return None
                        newest = number
                    # The first element of the window would be element `start` of this chunk.
                    first = max(0, start)
                    last = min(self.chunk, start + length)
                    windows[row, first - start : last - start] = elements[first:last]
        except (OSError, OverflowError, _Damaged):
            return None
        return windows

    def _find_pieces(self, starts_N: np.ndarray, length: int) -> Iterator[tuple[int, int, int]]:
        """Yields (chunk, window, the window's start from the start of the chunk) in the order of the chunks."""
        firsts_N, lasts_N = starts_N // self.chunk, (starts_N + (length - 1)) // self.chunk
        numbers_NxM = firsts_N[:, None] + np.arange(int((lasts_N - firsts_N).max()) + 1)
        windows_P, columns_P = np.nonzero(numbers_NxM <= lasts_N[:, None])
        numbers_P = numbers_NxM[windows_P, columns_P]
        order_P = np.argsort(numbers_P, kind='stable')
        numbers_P, windows_P = numbers_P[order_P], windows_P[order_P]
        offsets_P = starts_N[windows_P] - numbers_P * self.chunk
        return zip(numbers_P.tolist(), windows_P.tolist(), offsets_P.tolist(), strict=True)

    def _read_index(self, file: int) -> np.ndarray:
        """Returns (offset, bytes) of each chunk of an open file, [shard / chunk, 2]. Raises _Damaged."""
        status = os.fstat(file)
        identity = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
        index = self._indexes.get(identity)
        if index is None:
            size = 16 * (self.shard // self.chunk)
            content = os.pread(file, size + CRC_BYTES, max(0, status.st_size - size - CRC_BYTES))
            entries = content[:size]
            if google_crc32c.value(entries).to_bytes(CRC_BYTES, 'little') != content[size:]:
                raise _Damaged
            index = np.frombuffer(entries, '<u8').reshape(-1, 2)
            with self._lock:
                while len(self._indexes) >= self.most_indexes:
                    del self._indexes[next(iter(self._indexes))]
                self._indexes[identity] = index
        return index


def _read_at_once(file: int, buffers: list[memoryview], offset: int, size: int) -> bool:
    """Fills the buffers from the page cache, and returns whether all of it was there."""
    with contextlib.suppress(BlockingIOError):
        return os.preadv(file, buffers, offset, NO_WAIT or 0) == size
    return False


class _Damaged(Exception):
    """An index does not have its checksum."""


@contextlib.contextmanager
def open_file(path: str) -> Iterator[int]:
    """Opens a file for reading and yields its descriptor."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)
