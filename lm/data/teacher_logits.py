"""The teacher's predictions for the windows of a training split, kept in the token store.

    {split}/teacher_{k}_{length}/
        ids           zarr3 array, flat [tokens, k]: the most probable next tokens, uint32
        logs          their log-probabilities, float32
        logits.json   the teacher and the data; written last

Position t is of token t as an input, in the window that begins at a multiple of `length`. So a run with windows of
another length, or a teacher that has changed, needs other files.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorstore as ts

from lm.data.store import (
    SHARD,
    TokenStore,
    find_missing_files,
    open_kvstore,
    read_file,
    read_windows,
    write_array_file,
    write_file,
)
from lm.errors import AbsentError, MismatchError
from lm.files import parse_json_object

IDS, LOGS, RECORD = 'ids', 'logs', 'logits.json'
TYPES = {IDS: 'uint32', LOGS: 'float32'}
PARTIAL = 'unfinished.json'
"""The record of unfinished predictions: files of other ones are deleted before the work goes on."""
REMEDY = 'the predictions are damaged; delete this folder, and make them again with lm distill --cache'


@dataclasses.dataclass(frozen=True)
class CacheKey:
    """The teacher and the windows that cached predictions belong to.

    Attributes:
        teacher: the fingerprint of the weights of the teacher.
        data: the fingerprint of the token store.
        length: tokens of a window.
        k: tokens that are kept per position.
        inputs: how windows become inputs: the token before a text, and whether documents are told apart.
    """

    teacher: str
    data: str
    split: str
    length: int
    k: int
    inputs: str

    @property
    def folder(self) -> str:
        """The folder of the arrays, below the folder of the split."""
        return f'teacher_{self.k}_{self.length}'

    def record(self) -> bytes:
        """Returns the contents of the record."""
        entries = dataclasses.asdict(self)
        digest = hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()
        return json.dumps(entries | {'sha256': digest}, indent=2).encode() + b'\n'


class TeacherLogits:
    """Finished predictions, opened for reading."""

    def __init__(self, store: TokenStore, key: CacheKey):
        """Raises AbsentError where there are none, MismatchError if they are damaged or of something else."""
        self.store, self.key = store, key
        place = f'{store.path}/{key.split}/{key.folder}'
        remedy = f'run lm distill --cache {key.k} with the same settings'
        found = read_file(open_kvstore(store.path), f'{key.split}/{key.folder}/{RECORD}')
        if found is None:
            raise AbsentError(f'distill.top_k = {key.k}: {place} has no finished predictions of the teacher; {remedy}')
        if found != key.record():
            wrong = _compare(found, key)
            raise MismatchError(f'distill.top_k = {key.k}: {place} is of another {wrong}; {remedy}')
        count = _count(store, key) * key.k
        self._arrays = {
            name: store.open_array(key.split, f'{key.folder}/{name}', kind, count, REMEDY)
            for name, kind in TYPES.items()
        }

    def read_many(self, split: str, starts: Sequence[int] | np.ndarray, length: int) -> dict[str, np.ndarray]:
        """Reads windows with the predictions for them.

        Returns:
            tokens [n, length], ids [n, length - 1, k] int32 and logs [n, length - 1, k] float32.
        """
        k, inputs = self.key.k, length - 1
        arrays = [self._arrays[name] for name in (IDS, LOGS)]
        try:
            found = read_windows(arrays, np.asarray(starts) * k, inputs * k)
        except ValueError as error:
            raise self.store.explain_damage(split, self.key.folder, error, REMEDY) from None
        ids, logs = (array.reshape(len(starts), inputs, k) for array in found)
        return {'tokens': self.store.read_many(split, starts, length), IDS: ids.astype(np.int32), LOGS: logs}


def write_logits(
    store: TokenStore, key: CacheKey, predict: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
) -> Iterator[tuple[int, int]]:
    """Writes predictions that are not there yet, and yields after each file how many files there are, and of how many.

    Args:
        predict: the numbers of windows [n] → the most probable tokens [n, length, k], and their log-probabilities.
    """
    path, split, target = store.path, key.split, open_kvstore(store.path)
    here = f'{split}/{key.folder}'
    kept = [read_file(target, f'{here}/{name}') for name in (RECORD, PARTIAL)]
    if key.record() not in kept:
        for name in (RECORD, PARTIAL):
            target.write(f'{here}/{name}', None).result()
        for name in TYPES:
            target.delete_range(ts.KvStore.KeyRange(f'{here}/{name}/', f'{here}/{name}0')).result()
    write_file(path, f'{here}/{PARTIAL}', key.record())
    count = _count(store, key) * key.k
    missing = {name: find_missing_files(path, split, f'{key.folder}/{name}', count) for name in TYPES}
    files, todo = -(-count // SHARD), sorted({number for numbers in missing.values() for number in numbers})
    for done, number in enumerate(todo, files - len(todo) + 1):
        first, end = number * SHARD, min(count, (number + 1) * SHARD)
        per_window = key.k * key.length
        windows = np.arange(first // per_window, -(-end // per_window))
        skipped = first - int(windows[0]) * per_window
        for name, array in zip(TYPES, predict(windows), strict=True):
            part = array.reshape(-1)[skipped : skipped + end - first].astype(TYPES[name])
            write_array_file(path, split, f'{key.folder}/{name}', number, part, count)
        yield done, files
    write_file(path, f'{here}/{RECORD}', key.record())
    target.write(f'{here}/{PARTIAL}', None).result()


def _count(store: TokenStore, key: CacheKey) -> int:
    """Returns the number of positions in all windows of training."""
    return (store.tokens(key.split) - 1) // key.length * key.length


def _compare(found: bytes, key: CacheKey) -> str:
    """Names what the record of other predictions differs in."""
    try:
        entries: Any = parse_json_object(found)
    except ValueError:
        return 'version, or damaged'
    names = [name for name, value in dataclasses.asdict(key).items() if entries.get(name) != value]
    return ' and '.join(names) or 'version, or damaged'
