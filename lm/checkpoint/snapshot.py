"""One saved step on disk: its contents, the check that it belongs to this run, and the check that it is sound.

    <step>/commit_success.txt     written last
    <step>/metadata/metadata      a JSON record: dtype, shape and checksum of each array, fingerprints of the run's
                                  inputs, metrics, and the SHA-256 of the record itself
    <step>/state/                 the arrays under flat names ('params.blocks.qkv'): zarr in TensorStore's OCDBT

Orbax writes this layout. It is read with TensorStore directly. Orbax's restore synchronizes the processes, which
hangs when a single process meets a bad file. It also casts dtypes silently, and hides the name of the bad file.
"""

import contextlib
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import tensorstore as ts
from etils import epath
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.experimental import multihost_utils

from lm.checkpoint.checksum import checksums
from lm.checkpoint.memory import ReadBudget, give_back_memory
from lm.errors import LmError, MismatchError, exit_code_of
from lm.files import GONE, folder_spec, is_damage, parse_json, reaching, write_atomically
from lm.text import make_visible, parse_whole

FORMAT = 1
COMMITTED = 'commit_success.txt'
PARALLEL_ARRAYS = 8
"""Arrays read at a time, at most."""
READ_SHARE, READ_AT_LEAST = 1 / 16, 2**24
"""The share of the bytes of this process that is read at a time, or one array. Each byte is in memory three times: as a
file, decoded, and on its way to a device. This bounds the host memory of a restore."""
DAMAGED, FAILED = 1, 1000
"""The codes that processes exchange: the step is damaged; or FAILED plus the exit code of another failure."""


class Damaged(Exception):
    """One step is damaged; the message names the file or the array."""


class Snapshot:
    """The step `step` of the checkpoints in `directory`, absolute or an address such as gs://…"""

    def __init__(self, directory: epath.Path, step: int):
        self.step = step
        self.path = directory / str(step)

    def is_committed(self) -> bool:
        return (self.path / COMMITTED).exists()

    def record(self) -> dict:
        """Returns the JSON record of the step. Raises Damaged, or LmError where the storage fails."""
        try:
            self._content(self.path / COMMITTED)
        except GONE:
            raise Damaged(f'{self.path / COMMITTED} is missing: the save was never completed') from None
        path = self.path / 'metadata' / 'metadata'
        try:
            record = parse_json(self._content(path))
        except (*GONE, ValueError) as error:
            raise Damaged(f'{path} cannot be read ({describe_error(error)})') from None
        record = open_record(record, self.step, path)
        if record.get('format', FORMAT) != FORMAT:
            raise MismatchError(
                f'{path}: checkpoint format {str(record["format"])[:20]}, this version reads {FORMAT}; '
                'use the version of the run'
            )
        if not is_whole(record):  # a stranger can compute the SHA-256, too
            raise Damaged(f'{path} has entries of other types than a checkpoint has')
        return record

    def restore(
        self, abstract_state: object, fingerprints: Mapping[str, str], partial: bool = False
    ) -> tuple[Any, dict]:
        """Reads a state like `abstract_state`, and returns it with the record. All processes call it together and share
        one outcome.

        Args:
            partial: leave out what the step lacks, and ignore what it has besides (nested dicts only).

        Raises:
            Damaged: files of the step are missing or cannot be parsed, or a checksum is wrong.
            MismatchError: it is in order but belongs to something else.
            LmError: the storage or this machine has failed; the step may be sound.
        """
        with Agreement(self.step):
            record = self.record()
            if partial:
                leaves, found = record['leaves'], flatten_dict(abstract_state)
                abstract_state = unflatten_dict({path: x for path, x in found.items() if name_leaf(path) in leaves})
            abstract = flatten(abstract_state)
            self.compare(record, abstract, fingerprints, partial)
        arrays = self.read(abstract, record)
        return jax.tree.unflatten(jax.tree.structure(abstract_state), [arrays[name] for name in abstract]), record

    def read(self, abstract: Mapping[str, Any], record: dict) -> dict[str, jax.Array]:
        """Returns the named arrays with the shardings of `abstract` (default: the first local device), verified."""
        context = ts.Context({'cache_pool': {'total_bytes_limit': 0}})
        sizes = {name: _local_bytes(target) for name, target in abstract.items()}
        budget = ReadBudget(max(READ_AT_LEAST, int(READ_SHARE * sum(sizes.values()))))

        def read_one(name: str) -> jax.Array:
            with self.reading(name), budget.spend(sizes[name]):
                return self._read_array(name, abstract[name], context)

        with Agreement(self.step), ThreadPoolExecutor(PARALLEL_ARRAYS) as pool:
            arrays = dict(zip(abstract, pool.map(read_one, abstract), strict=True))
        give_back_memory()
        wrong = [name for name, c in checksums(arrays).items() if c != record['leaves'][name]['checksum']]
        if wrong:
            raise Damaged(f'{self.path / "state"}: the checksum of {list_last(wrong)} does not match')
        return arrays

    def add_metrics(self, metrics: Mapping[str, float | str]) -> None:
        """Writes the record again, with these metrics too. Raises what `record` and writing raise."""
        record = self.record()
        record['metrics'] |= _plain(metrics)
        write_atomically(self.path / 'metadata' / 'metadata', json.dumps(record | {'sha256': _sha256(record)}))

    def _content(self, path: epath.Path) -> bytes:
        try:
            with reaching(path):
                return path.read_bytes()
        except GONE:
            raise
        except OSError as error:
            raise _out_of_reach(path, error) from error

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """A block that reads the array `name`. Raises Damaged or LmError, as `restore` does."""
        try:
            yield
        except Exception as error:
            if not is_damage(error):
                raise _out_of_reach(f'{name} in {self.path / "state"}', error) from error
            raise Damaged(f'{name} in {self.path / "state"} cannot be read ({describe_error(error)})') from None

    def open_array(self, name: str, target: Any, context: ts.Context) -> ts.TensorStore:
        """Opens an array for reading. Raises ValueError if it has another shape or type than `target`."""
        spec = {
            'driver': 'zarr',
            'kvstore': {'driver': 'ocdbt', 'base': folder_spec(self.path / 'state'), 'path': name + '/'},
            'fill_missing_data_reads': False,
        }
        store = ts.open(spec, open=True, context=context).result()
        if store.shape != tuple(target.shape) or store.dtype.numpy_dtype != target.dtype:
            raise ValueError(f'it is {store.dtype.name}{list(store.shape)}')
        chunk = [size or 0 for size in store.chunk_layout.read_chunk.shape or ()]
        if any(size > max(1, length) for size, length in zip(chunk, store.shape, strict=False)):
            # A chunk is decoded whole: a few bytes may claim to be more than the memory holds.
            raise ValueError(f'its chunks of {chunk} are larger than itself, {list(store.shape)}')
        return store

    def _read_array(self, name: str, target: Any, context: ts.Context) -> jax.Array:
        store = self.open_array(name, target, context)
        sharding = getattr(target, 'sharding', None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        indices = sharding.addressable_devices_indices_map(store.shape)
        keys = {device: str(index) for device, index in indices.items()}
        reads = {keys[device]: index for device, index in indices.items()}  # replicas are read once
        reads = {key: store[index].read() for key, index in reads.items()}
        shards = [jax.device_put(reads[keys[device]].result(), device) for device in indices]
        return jax.make_array_from_single_device_arrays(store.shape, sharding, shards)

    def compare(self, record: dict, abstract: Mapping, fingerprints: Mapping[str, str], partial: bool = False) -> None:
        """Raises MismatchError unless fingerprints, names, shapes and dtypes match this run."""
        for name, value in fingerprints.items():
            saved = record['fingerprints'].get(name)
            if saved != value:
                raise MismatchError(
                    f'checkpoint {self.path}: {name} is {saved}, of this run {value}; '
                    f'use the {name} of that run, or a new run directory'
                )
        leaves = record['leaves']
        parts = {name.partition('.')[0] for name in abstract}
        missing = [name for name in abstract if name not in leaves]
        extra = [name for name in leaves if name.partition('.')[0] in parts and name not in abstract]
        if (missing or extra) and not partial:
            raise MismatchError(
                f'checkpoint {self.path} '
                + (f'lacks {missing[0]}, which this run has' if missing else f'has {extra[0]}, which this run lacks')
                + '; use the model and optimizer of that run, or a new run directory'
            )
        for name, leaf in abstract.items():
            saved = f'{leaves[name]["dtype"]}{leaves[name]["shape"]}'
            expected = f'{jax.numpy.dtype(leaf.dtype).name}{list(leaf.shape)}'
            if saved != expected:
                raise MismatchError(
                    f'checkpoint {self.path}: {name} is {saved}, of this run {expected}; '
                    'use the model and optimizer of that run, or a new run directory'
                )


def describe_arrays(arrays: Mapping[str, jax.Array]) -> dict[str, dict[str, object]]:
    """Returns type, shape and checksum of each array, as a record has them."""
    return {
        name: {'dtype': arrays[name].dtype.name, 'shape': list(arrays[name].shape), 'checksum': total}
        for name, total in checksums(arrays).items()
    }


def make_record(
    step: int,
    leaves: Mapping[str, Mapping[str, object]],
    fingerprints: Mapping[str, str],
    metrics: Mapping[str, float | str],
    metadata: Mapping[str, object],
) -> dict:
    """Makes the record of a step with these `leaves` (`describe_arrays`). Metrics that are not finite become text."""
    record = {
        'format': FORMAT,
        'step': step,
        'leaves': {name: dict(leaf) for name, leaf in leaves.items()},
        'fingerprints': dict(fingerprints),
        'metrics': _plain(metrics),
        'metadata': dict(metadata),
    }
    record = json.loads(json.dumps(record, allow_nan=False))
    return record | {'sha256': _sha256(record)}


def open_record(sealed: object, step: int, where: object) -> dict:
    """Returns the record of `make_record` without its SHA-256. Raises Damaged unless it is the one of `step`."""
    record = dict(sealed) if isinstance(sealed, dict) else {}
    if record.pop('sha256', None) != _sha256(record) or record.get('step') != step:
        raise Damaged(f'{where} does not match its SHA-256 or the step')
    return record


def find_steps(directory: epath.Path) -> list[int]:
    """Returns the steps that have a folder in `directory`, complete or not, ascending."""
    if not directory.exists():
        return []
    found = ((path.name, parse_whole(path.name)) for path in directory.iterdir())
    return sorted(step for name, step in found if step is not None and step < 2**31 and str(step) == name)


def find_committed_steps(directory: epath.Path) -> list[int]:
    """Returns the steps that are complete, ascending. They may still turn out to be damaged."""
    return [step for step in find_steps(directory) if Snapshot(directory, step).is_committed()]


def flatten(tree: Any) -> dict[str, Any]:
    """Returns dotted name → leaf, in the order of jax.tree.leaves."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator='.'): leaf for path, leaf in leaves}
    if len(named) != len(leaves):
        raise ValueError('two leaves of the state have the same name')
    return named


def _local_bytes(target: Any) -> int:
    """Bytes of an array that this process reads."""
    sharding = getattr(target, 'sharding', None)
    shape = tuple(target.shape)
    places = sharding.addressable_devices_indices_map(shape).values() if sharding else [None]
    shard = sharding.shard_shape(shape) if sharding else shape
    return len({str(index) for index in places}) * math.prod(shard) * jax.numpy.dtype(target.dtype).itemsize


def name_leaf(path: tuple) -> str:
    """Returns the dotted name of a leaf from the keys that lead to it."""
    return '.'.join(map(str, path))


class Agreement(contextlib.AbstractContextManager['Agreement']):
    """A block that fails either in all processes, with the same exit code, or in none."""

    def __init__(self, step: int):
        self.step = step

    def __exit__(self, kind, error, traceback) -> None:
        if jax.process_count() == 1:
            return
        mine = 0 if error is None else DAMAGED
        if error is not None and not isinstance(error, Damaged):
            mine = FAILED + exit_code_of(error)
        worst = int(np.max(multihost_utils.process_allgather(np.int32(mine))))
        if worst <= mine:
            return
        message = f'checkpoint step {self.step}: see the message of another process'
        if worst == DAMAGED:
            raise Damaged(message)
        failure = LmError(message)
        failure.exit_code = worst - FAILED
        raise failure


@contextlib.contextmanager
def refuse_damage(step: int) -> Iterator[None]:
    """Turns damage of `step` into a MismatchError."""
    try:
        yield
    except Damaged as damage:
        raise MismatchError(f'checkpoint step {step} is damaged: {damage}; choose another step') from None


def _out_of_reach(what: object, error: Exception) -> LmError:
    return LmError(
        f'checkpoint: {what} could not be read ({describe_error(error)}), which is no damage: nothing is set aside; '
        'remove the cause, then run the same command again'
    )


def list_last(items: list) -> str:
    """Returns the last few items for a message."""
    return ('… ' if len(items) > 4 else '') + ', '.join(map(str, items[-4:])) if items else 'none'


def describe_error(error: BaseException) -> str:
    """Describes an exception in one line: its kind and text. A long chain of causes is cut to its first cause, and to
    the message of the system or its last cause."""
    text = make_visible(' '.join(str(error).split()))
    if len(text) > 400:
        system = re.search(r"os_error_code='(\d+)'", text)  # TensorStore's
        text = f'{text[:180]} … {os.strerror(int(system[1])) if system else text[-200:]}'
    return f'{type(error).__name__}: {text}'


def _plain(metrics: Mapping[str, float | str]) -> dict[str, float | str]:
    return {k: float(v) if not isinstance(v, str) and math.isfinite(v) else str(v) for k, v in metrics.items()}


def is_whole(record: dict) -> bool:
    """Returns whether the entries of a record have the types that readers count on."""
    parts = [record.get(name) for name in ('leaves', 'fingerprints', 'metrics', 'metadata')]
    leaves, fingerprints, metrics, metadata = (part if isinstance(part, dict) else None for part in parts)
    if leaves is None or fingerprints is None or metrics is None or metadata is None:
        return False
    entries = [leaf if isinstance(leaf, dict) else {} for leaf in leaves.values()]
    seconds = [metadata.get(name, 0.0) for name in ('seconds', 'step_seconds')]
    skipped = metadata.get('skipped_batches') or []
    return (
        all(isinstance(e.get('dtype'), str) and isinstance(e.get('shape'), list) for e in entries)
        and all(type(e.get('checksum')) is int for e in entries)
        and all(isinstance(value, str) for value in fingerprints.values())
        and all(isinstance(value, float | int | str) for value in metrics.values())
        and all(type(value) in (int, float) and math.isfinite(value) for value in seconds)
        and all(isinstance(metadata.get(name) or '', str) for name in ('config', 'metrics_sha256'))
        and all(type(metadata.get(name, 0)) is int for name in ('metrics_lines', 'kept_numbers'))
        and isinstance(skipped, list)
        and all(isinstance(pair, list) and [type(n) for n in pair] == [int, int] for pair in skipped)
    )


def _sha256(record: dict) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
