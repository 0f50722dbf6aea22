"""A file of safetensors in a bucket, whose tensors are read by requests of their own.

The library reads files of this machine alone. https://huggingface.co/docs/safetensors describes the format: the size of
the header in 8 bytes, the header as JSON, and the numbers.
"""

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from lm.buckets import NoAnswerError
from lm.errors import LmError, MismatchError
from lm.files import GONE, AnyPath, JsonObject, file_size, parse_json, reaching

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


class RemoteTensor(NamedTuple):
    """The type of a tensor, its shape, and its place in the file behind the header, in bytes."""

    kind: str
    shape: list[int]
    place: tuple[int, int]

    def get_dtype(self) -> str:
        return self.kind

    def get_shape(self) -> list[int]:
        return self.shape


class RemoteFile:
    """The file at the address `path`, with the functions of the library's opened files.

    All raise MismatchError for a missing or damaged file, and LmError where the storage fails.
    """

    def __init__(self, path: AnyPath):
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def keys(self) -> list[str]:
        return list(self._tensors)

    def metadata(self) -> dict[str, str]:
        return self._header[1]

    def get_slice(self, name: str) -> RemoteTensor:
        return self._tensors[name]

    def get_tensor(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        numbers = self._read(*(self._header[0] + end for end in tensor.place))
        return numbers.view(TYPES[tensor.kind]).reshape(tensor.shape)

    @functools.cached_property
    def _header(self) -> tuple[int, dict[str, str], dict[str, RemoteTensor]]:
        """Where the numbers begin, the metadata, and the tensors."""
        size = int.from_bytes(self._read(0, 8).tobytes(), 'little')
        if size > MOST_HEADER:
            raise self._refuse(f'a header of {size:,} bytes')
        begin = 8 + size
        try:
            entries = dict(parse_json(self._read(8, begin).tobytes()))
            metadata = entries.pop('__metadata__', {})
            tensors = {name: read_entry(entry) for name, entry in entries.items()}
            found = {name: str(text) for name, text in metadata.items()}
        except (ValueError, TypeError, KeyError, AttributeError):
            raise self._refuse('no header') from None
        return begin, found, tensors

    @functools.cached_property
    def _bytes(self) -> int:
        with self._reaching():
            return file_size(self.path)

    @property
    def _tensors(self) -> dict[str, RemoteTensor]:
        return self._header[2]

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
            raise MismatchError(f'{self.path}: there is none; copy it there, or name another folder') from None
        except OSError as error:
            if isinstance(error.__cause__, NoAnswerError):  # it says everything
                raise error.__cause__ from None
            said = ' '.join(str(error).split())
            raise LmError(f'{self.path} could not be read ({said}); run the same command again') from error

    def _refuse(self, what: str) -> MismatchError:
        return MismatchError(f'{self.path} cannot be read (it has {what}); copy it there again')


def read_entry(entry: JsonObject) -> RemoteTensor:
    """Reads the entry of a tensor in a header. Raises ValueError, TypeError or KeyError if it contradicts itself.

    Types that no weights have are left to the reader of the tensors, which names them.
    """
    kind, shape, (begin, end) = entry['dtype'], [int(n) for n in entry['shape']], entry['data_offsets']
    if min(begin, *shape, 0) < 0 or (kind in TYPES and end - begin != math.prod(shape) * TYPES[kind].itemsize):
        raise ValueError('its size is not the one of its shape')
    return RemoteTensor(str(kind), shape, (begin, end))
