"""A file of safetensors, on a disk or in a bucket, whose tensors are read one at a time.

The library reads files of this machine alone, and through JAX where they hold bfloat16.
https://huggingface.co/docs/safetensors describes the format: the size of the header in 8 bytes, the header as JSON, and
the numbers.
"""

import contextlib
import functools
import math
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from lm.buckets import NoAnswerError
from lm.errors import LmError, MismatchError
from lm.files import GONE, AnyPath, JsonObject, file_size, is_remote, parse_json, reaching

TYPES = {
    'F32': np.dtype(np.float32),
    'BF16': np.dtype(jnp.bfloat16),
    'F16': np.dtype(np.float16),
    'F64': np.dtype(np.float64),
}
"""The name in a header → the type, for the types that weights have."""
MOST_HEADER = 10**8
"""The library reads no larger header."""
PART_BYTES = 2**26
"""So much is asked for at a time: a request must end in time (`lm.buckets`)."""


class TensorFile:
    """The file at the address `path`.

    All functions raise MismatchError for a missing or damaged file, and LmError where the storage fails.
    """

    def __init__(self, path: AnyPath):
        self.path = path

    @property
    def shapes(self) -> dict[str, list[int]]:
        """Name → shape of each tensor. Raises MismatchError also for numbers that are no weights."""
        for name, entry in self._entries.items():
            if entry['dtype'] not in TYPES:
                raise MismatchError(
                    f"{self.path}: tensor '{name}' holds {entry['dtype']}, and weights are {', '.join(TYPES)}; "
                    'fetch a checkpoint that is not quantized'
                )
        return {name: entry['shape'] for name, entry in self._entries.items()}

    @property
    def metadata(self) -> dict[str, str]:
        return self._header[1]

    def read(self, name: str) -> np.ndarray:
        """Reads one tensor as float32."""
        entry, (begin, _, _) = self._entries[name], self._header
        numbers = self._read(*(begin + end for end in entry['data_offsets'])).view(TYPES[entry['dtype']])
        return numbers.reshape(entry['shape']).astype(np.float32, copy=False)

    @property
    def _entries(self) -> dict[str, JsonObject]:
        return self._header[2]

    @functools.cached_property
    def _header(self) -> tuple[int, dict[str, str], dict[str, JsonObject]]:
        """Where the numbers begin, the metadata, and the entries of the tensors."""
        size = int.from_bytes(self._read(0, 8).tobytes(), 'little')
        if size > MOST_HEADER:
            raise self._refuse(f'a header of {size:,} bytes')
        begin = 8 + size
        try:
            entries = dict(parse_json(self._read(8, begin).tobytes()))
            metadata = entries.pop('__metadata__', {})
            for entry in entries.values():
                check_entry(entry)
            found = {name: str(text) for name, text in metadata.items()}
            ends = [entry['data_offsets'] for entry in entries.values()]
        except (ValueError, TypeError, KeyError, AttributeError):
            raise self._refuse('no header') from None
        covered = sum(end - start for start, end in ends)
        if covered != max((end for _, end in ends), default=0) or begin + covered != self._bytes:
            raise self._refuse('another number of bytes than its header says')
        return begin, found, entries

    @functools.cached_property
    def _bytes(self) -> int:
        with self._reaching():
            return file_size(self.path)

    def _read(self, begin: int, end: int) -> np.ndarray:
        """Returns the bytes of a part of the file."""
        if end > self._bytes:  # a damaged header may ask for any memory
            raise self._refuse('fewer bytes than its header says')
        found, filled = np.empty(end - begin, np.uint8), 0
        with self._reaching(), self.path.open('rb') as file:
            file.seek(begin)
            while part := file.read(min(PART_BYTES, len(found) - filled)):
                found[filled : filled + len(part)] = np.frombuffer(part, np.uint8)
                filled += len(part)
        if filled < len(found):
            raise self._refuse('fewer bytes than its header says')
        return found

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            with reaching(self.path):
                yield
        except GONE:
            raise MismatchError(f'{self.path}: there is none; fetch it, or name another folder') from None
        except OSError as error:
            if isinstance(error.__cause__, NoAnswerError):  # it says everything
                raise error.__cause__ from None
            said = ' '.join(str(error).split())
            if not is_remote(self.path):
                raise MismatchError(f'{self.path} cannot be read ({said}); fetch it again') from None
            raise LmError(f'{self.path} could not be read ({said}); run the same command again') from error

    def _refuse(self, what: str) -> MismatchError:
        return MismatchError(f'{self.path} cannot be read (it has {what}); fetch it again')


def check_entry(entry: JsonObject) -> None:
    """Raises ValueError, TypeError or KeyError if the entry of a tensor in a header contradicts itself.

    Types that no weights have are left to the reader of the tensors, which names them.
    """
    kind, shape, (begin, end) = entry['dtype'], entry['shape'], entry['data_offsets']
    if not all(isinstance(n, int) and n >= 0 for n in (begin, end, *shape)) or not isinstance(kind, str):
        raise ValueError('its size is no size')
    if kind in TYPES and end - begin != math.prod(shape) * TYPES[kind].itemsize:
        raise ValueError('its size is not the one of its shape')
