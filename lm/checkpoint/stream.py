"""A step of checkpoints that is written array by array, and each array part by part.

The memory holds one part at a time, so a host can write weights that it could not hold. `lm.checkpoint.snapshot`
describes the layout of a step, and reads it.
"""

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorstore as ts
from etils import epath
from jax.typing import DTypeLike

from lm.checkpoint.checksum import checksum_of_part
from lm.checkpoint.snapshot import COMMITTED, make_record
from lm.errors import writing
from lm.files import folder_spec, write_atomically

CHUNK_BYTES = 2**26
"""About so much is written, and read again, at a time."""
COMPRESSOR = {'id': 'zstd', 'level': 1}
"""The lower halves of numbers that were bfloat16 are zeros."""


class StepWriter:
    """Writes the step `step` of the checkpoints in `directory`, which has no such step. One process does."""

    def __init__(self, directory: epath.Path, step: int):
        """Deletes what a killed process has left of the step. Raises LmError where that fails."""
        self.step, self.path = step, directory / str(step)
        with writing(self.path):
            if self.path.exists():
                self.path.rmtree()
        self.leaves: dict[str, dict[str, Any]] = {}

    def write(self, name: str, shape: tuple[int, ...], dtype: DTypeLike, parts: Iterable[np.ndarray]) -> None:
        """Writes an array of one axis or more, whose `parts` follow one another on the first axis.

        Raises LmError if the storage fails, and whatever `parts` raises.
        """
        dtype, total, row = np.dtype(dtype), 0, 0
        chunk = choose_chunk(shape, dtype.itemsize)
        spec = {
            'driver': 'zarr',
            'kvstore': {'driver': 'ocdbt', 'base': folder_spec(self.path / 'state'), 'path': name + '/'},
            'metadata': {
                'shape': list(shape),
                'chunks': list(chunk),
                'dtype': dtype.str if dtype.kind != 'V' else dtype.name,
                'compressor': COMPRESSOR,
            },
        }
        with writing(self.path / 'state' / name):
            try:
                store = ts.open(spec, create=True).result()
                for part in parts:
                    for place, first in cut_part(part.shape, chunk):
                        own = np.ascontiguousarray(part[place], dtype)
                        total += checksum_of_part(own, row * math.prod(shape[1:]) + first)
                        store[(slice(row + place[0].start, row + place[0].stop), *place[1:])].write(own).result()
                    row += len(part)
            except ValueError as error:  # TensorStore's word for a failure of the storage
                raise OSError(str(error).split(' [')[0]) from error
        if row != shape[0]:
            raise ValueError(f'{name}: {row} rows of {shape}')
        self.leaves[name] = {'dtype': dtype.name, 'shape': list(shape), 'checksum': total % 2**32}

    def commit(self, fingerprints: Mapping[str, str], metadata: Mapping[str, Any]) -> None:
        """Completes the step. Raises LmError if the storage fails."""
        record = make_record(self.step, self.leaves, fingerprints, {}, metadata)
        with writing(self.path):
            folder = self.path / 'metadata'
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / 'metadata', json.dumps(record))
            write_atomically(self.path / COMMITTED, f'step {self.step}\n')


def choose_chunk(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Returns the shape of chunks of about `CHUNK_BYTES`: rows of the array, or parts of a row."""
    rest = math.prod(shape[1:]) * itemsize
    if rest <= CHUNK_BYTES or len(shape) == 1:
        return max(1, min(shape[0], CHUNK_BYTES // max(1, rest))), *shape[1:]
    return 1, *choose_chunk(shape[1:], itemsize)


def cut_part(shape: Sequence[int], chunk: Sequence[int]) -> Iterator[tuple[tuple[slice, ...], int]]:
    """Yields the place of each chunk of a part, and the flat index of its first element; its elements are in a row."""
    counts = [range(0, length, step) for length, step in zip(shape, chunk, strict=True)]
    for start in itertools.product(*counts):
        ends = (min(a + step, length) for a, step, length in zip(start, chunk, shape, strict=True))
        yield tuple(map(slice, start, ends)), int(np.ravel_multi_index(start, tuple(shape)))
