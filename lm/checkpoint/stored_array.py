"""An array of a saved step that stays on disk and is read in pieces.

A piece has as many rows (entries of the first axis) as a chunk of the files, for a chunk is decoded as a whole. The
chunks of an import have few rows, and the chunks of a run of `lm train` have all rows that a device held.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import tensorstore as ts
from etils import epath

from lm.checkpoint.checksum import checksum_of_part
from lm.checkpoint.finite import describe_not_finite, find_not_finite
from lm.checkpoint.folder import check_step
from lm.checkpoint.snapshot import Damaged, Snapshot, find_committed_steps, flatten, refuse_damage
from lm.errors import MismatchError


class StoredArray:
    """The array `name` of a saved step, of `shape` and `dtype`.

    All arrays of a step share `kept`: the piece that was read last, under its array and first row.
    """

    def __init__(self, snapshot: Snapshot, name: str, store: ts.TensorStore, checksum: int, kept: dict):
        self.name, self.shape, self.dtype = name, tuple(store.shape), store.dtype.numpy_dtype
        chunk = store.chunk_layout.read_chunk.shape or (1,)
        self._rows = max(1, chunk[0] or 1)
        if not store.rank:  # a number is one row
            store = store[ts.newaxis]
        self._snapshot, self._store, self._checksum, self._kept = snapshot, store, checksum, kept

    @property
    def piece_bytes(self) -> int:
        """The bytes that are read together."""
        return self.dtype.itemsize * min(self._rows, self._store.shape[0]) * math.prod(self.shape[1:])

    def read_row(self, row: int) -> np.ndarray:
        """Returns an entry of the first axis. Raises as `read_all`."""
        start = row // self._rows * self._rows
        if (self.name, start) not in self._kept:
            self._kept.clear()  # first: two pieces would be in memory
            self._kept[self.name, start] = self._read(start, start + self._rows)
        return self._kept[self.name, start][row - start]

    def read_all(self) -> np.ndarray:
        """Returns the whole array. Raises MismatchError for damaged files, and LmError where the storage fails."""
        self._kept.clear()
        return self._read(0, self._store.shape[0]).reshape(self.shape)

    def verify(self) -> None:
        """Reads everything, a piece at a time. Raises MismatchError if it is damaged or not finite."""
        self._kept.clear()
        total, width, is_finite = 0, math.prod(self.shape[1:]), True
        for start in range(0, self._store.shape[0], self._rows):
            piece = self._read(start, start + self._rows)
            total += checksum_of_part(piece, start * width)
            is_finite = is_finite and not find_not_finite({self.name: piece})
        step = self._snapshot.step
        if total % 2**32 != self._checksum:
            with refuse_damage(step):
                raise Damaged(f'{self._snapshot.path / "state"}: the checksum of {self.name} does not match')
        if not is_finite:
            raise MismatchError(f'checkpoint step {step}: {describe_not_finite(self.name)}; choose another step')

    def _read(self, start: int, end: int) -> np.ndarray:
        with refuse_damage(self._snapshot.step), self._snapshot.reading(self.name):
            return np.asarray(self._store[start : min(end, self._store.shape[0])].read().result())


def open_arrays(
    directory: epath.Path, abstract: Any, step: int | None, fingerprints: Mapping[str, str]
) -> tuple[Any, int] | None:
    """Opens a saved step of the checkpoints in `directory`, the newest one by default.

    Returns a state like `abstract` whose arrays are a `StoredArray` each, and the step; None: there is no checkpoint.
    Raises the errors of `Checkpointer.restore`; what is damaged is told by the arrays, and no older step is taken.
    """
    known = find_committed_steps(directory)
    check_step(step, known, directory)
    chosen = max(known, default=None) if step is None else step
    if chosen is None:
        return None
    snapshot, context = Snapshot(directory, chosen), ts.Context({'cache_pool': {'total_bytes_limit': 0}})
    with refuse_damage(chosen):
        record, leaves = snapshot.record(), flatten(abstract)
        snapshot.compare(record, leaves, fingerprints)
        kept: dict[tuple[str, int], np.ndarray] = {}
        arrays = []
        for name, target in leaves.items():
            with snapshot.reading(name):
                store = snapshot.open_array(name, target, context)
            arrays.append(StoredArray(snapshot, name, store, record['leaves'][name]['checksum'], kept))
    return jax.tree.unflatten(jax.tree.structure(abstract), arrays), chosen
