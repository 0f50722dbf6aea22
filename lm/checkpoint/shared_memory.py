"""The newest states of a run in the memory of its hosts, for a restart after the death of a process.

Files in /dev/shm outlive the process that writes them, and not the machine. Each process writes its parts of the state
into one of two files in turn, so that a kill leaves the other file whole:

    /dev/shm/lm-<user>-<run>/<process>.<0 or 1>
        64 bytes      magic, place and size of the description, its SHA-256; zero while the file is written
        parts         the bytes of each part of each array
        description   JSON: run, step, process, processes, the record of the step (`lm.checkpoint.snapshot`), the parts

Two files suffice: a process begins the next state when all processes have ended the one before, because the steps
between need all of them. The checksums of a record tell any damage of the parts.
"""

import contextlib
import hashlib
import json
import logging
import os
import pathlib
import re
import shutil
import struct
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import jax
import numpy as np
from jax.experimental import multihost_utils

from lm.checkpoint.checksum import checksums
from lm.checkpoint.memory import give_back_memory
from lm.checkpoint.snapshot import Agreement, Damaged, describe_error, flatten, is_whole, open_record
from lm.files import parse_json
from lm.hardware import read_host_memory
from lm.own_folder import open_own_file, own_folder

FOLDER = pathlib.Path('/dev/shm')
"""Where Linux keeps files in memory."""
HEAD = struct.Struct('<8sQQ32s8x')
MAGIC = b'lmstate1'
NAME = re.compile(r'\d+\.[01]')
ROOM = 2**26
"""Bytes of memory that stay free besides both files."""

log = logging.getLogger(__name__)


class SharedMemory:
    """The two newest states of this process of a run. All processes call `find_steps` and `restore` together.

    Args:
        directory: the run directory, which tells runs on one host apart.
        run: changes when a new run begins in the same directory; empty: the run is new, and there is nothing to find.
        find_fault: says of a step and the metadata of its state why the state is none of this run; None: it is.
    """

    def __init__(
        self, directory: object, run: str, find_fault: Callable[[int, Mapping[str, Any]], str | None] = lambda *_: None
    ):
        self.run, self._find_fault = run, find_fault
        key = hashlib.sha256(str(directory).encode()).hexdigest()[:16]
        self.folder = FOLDER / f'lm-{os.getuid()}-{key}'
        self._is_off = False
        self._refused: set[int] = set()

    def find_steps(self) -> list[int]:
        """Returns the steps that all processes hold in memory, the newest first."""
        mine = sorted({found['step'] for _, found in self._list()}, reverse=True)[:2]
        if jax.process_count() == 1:
            return mine
        all_PxN = multihost_utils.process_allgather(np.array([*mine, -1, -1][:2], np.int32))
        return sorted(set.intersection(*({*row} for row in all_PxN.tolist())) - {-1}, reverse=True)

    def newest(self) -> int:
        """Returns the newest step that this process holds; -1: none."""
        return max((found['step'] for _, found in self._list()), default=-1)

    def restore(self, abstract_state: object, step: int, fingerprints: Mapping[str, str]) -> tuple[Any, dict[str, Any]]:
        """Returns the state of a step that `find_steps` lists, with the shardings of `abstract_state`. A state that is
        refused counts no more.

        Raises:
            Damaged: the bytes are not those that were written, or they are of other arrays, layouts or inputs.
        """
        try:
            return self._restore(abstract_state, step, fingerprints)
        except Damaged:
            self._refused.add(step)
            raise

    def _restore(
        self, abstract_state: object, step: int, fingerprints: Mapping[str, str]
    ) -> tuple[Any, dict[str, Any]]:
        abstract = flatten(abstract_state)
        with Agreement(step):
            try:
                name, found = next((name, found) for name, found in self._list() if found['step'] == step)
                record = open_record(found['record'], step, self.folder)
                fault = self._find_fault(step, record['metadata']) if is_whole(record) else 'its record is damaged'
                if fault:
                    raise Damaged(f'{self.folder}: {fault}')
                parts = {tuple(part[:2]): tuple(part[2:]) for part in found['parts']}
                _compare(record, abstract, fingerprints)
                with own_folder(self.folder) as folder, open_own_file(name, folder) as file:
                    arrays = {array: _read(file, array, leaf, parts) for array, leaf in abstract.items()}
            except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
                raise Damaged(f'{self.folder}: {describe_error(error)}') from None
        give_back_memory()
        wrong = [name for name, c in checksums(arrays).items() if c != record['leaves'][name]['checksum']]
        if wrong:
            raise Damaged(f'{self.folder}: the checksum of {wrong[0]} does not match')
        return jax.tree.unflatten(jax.tree.structure(abstract_state), list(arrays.values())), record

    def write(self, arrays: Mapping[str, jax.Array], record: Mapping[str, Any]) -> None:
        """Writes the parts of this process over the older of its two files. A failure is a warning, and the last."""
        shards = {(name, str(s.index)): s.data for name, x in arrays.items() for s in x.addressable_shards}
        parts = [(name, index, data) for (name, index), data in shards.items() if data is not None]
        size = sum(data.nbytes for *_, data in parts)
        try:
            if not self._is_off and self._has_room(size):
                self._write(parts, size, record)
                self._refused.discard(record['step'])
        except OSError as error:
            self._give_up(describe_error(error))

    def delete(self) -> None:
        """Gives the memory of this process back, and the memory of processes that the run no longer has."""
        known = {f'{process}.{number}' for process in range(jax.process_count()) for number in (0, 1)}
        mine = {_name(number) for number in (0, 1)}
        with contextlib.suppress(OSError):
            with own_folder(self.folder) as folder:
                for name in filter(NAME.fullmatch, os.listdir(folder)):
                    if name in mine or name not in known:
                        os.unlink(name, dir_fd=folder)
            self.folder.rmdir()  # the last process of the host removes it

    def _write(self, parts: list[tuple[str, str, jax.Array]], size: int, record: Mapping[str, object]) -> None:
        steps = {name: found['step'] for name, found in self._list()}
        name = min(map(_name, (0, 1)), key=lambda name: steps.get(name, -1))
        places, offset = [], HEAD.size
        for array, index, data in parts:
            places.append([array, index, offset, data.nbytes])
            offset += data.nbytes
        facts = {'run': self.run, 'step': record['step'], **_this_process(), 'record': dict(record), 'parts': places}
        text = json.dumps(facts).encode()
        with own_folder(self.folder) as folder, open_own_file(name, folder, os.O_RDWR | os.O_CREAT) as file:
            descriptor = file.fileno()
            os.pwrite(descriptor, bytes(HEAD.size), 0)
            os.posix_fallocate(descriptor, 0, HEAD.size + size + len(text))  # what is missing is known at once
            file.seek(HEAD.size)
            for *_, data in parts:
                _write_all(file, np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
            _write_all(file, memoryview(text))
            os.ftruncate(descriptor, file.tell())
            os.pwrite(descriptor, HEAD.pack(MAGIC, offset, len(text), hashlib.sha256(text).digest()), 0)

    def _has_room(self, size: int) -> bool:
        """Tells whether both files fit into memory; if not, warns once. The folder is then there, and is ours."""
        if not FOLDER.is_dir():
            self._give_up(f'{FOLDER} is missing')
            return False
        with contextlib.suppress(FileExistsError):
            self.folder.mkdir(mode=0o700)
        with own_folder(self.folder) as folder:
            names = {_name(number) for number in (0, 1)}.intersection(os.listdir(folder))
            held = sum(os.lstat(name, dir_fd=folder).st_size for name in names)
        needed = 2 * size - held + ROOM if held < 2 * size else 0
        free = min(shutil.disk_usage(FOLDER).free, read_host_memory('MemAvailable') or 0)
        if needed > free:
            self._give_up(f'two states need {needed / 2**20:,.0f} MiB in {FOLDER}, and {free / 2**20:,.0f} are free')
            return False
        return True

    def _give_up(self, why: str) -> None:
        self._is_off = True
        self.delete()
        log.warning(
            'checkpoint.memory_every: no state is kept in memory (%s); make room, or set it to None; '
            'checkpoints in the run directory are written as before',
            why,
        )

    def _list(self) -> list[tuple[str, dict[str, Any]]]:
        """Returns the names of the whole files of this process and run, with their descriptions."""
        if not self.run:
            return []
        whole = []
        with contextlib.suppress(OSError), own_folder(self.folder) as folder:
            for name in map(_name, (0, 1)):
                found = _read_description(name, folder)
                is_ours = isinstance(found, dict) and found.get('run') == self.run and found | _this_process() == found
                if found and is_ours and type(found.get('step')) is int and 0 <= found['step'] < 2**31:
                    whole.append((name, found))
        return [(name, found) for name, found in whole if found['step'] not in self._refused]


def _name(number: int) -> str:
    return f'{jax.process_index()}.{number}'


def _this_process() -> dict[str, int]:
    return {'process': jax.process_index(), 'processes': jax.process_count()}


def _read_description(name: str, folder: int) -> dict[str, Any] | None:
    """Returns the description at the end of a file in an open folder; None if it is missing or was not completed."""
    with contextlib.suppress(OSError, ValueError, struct.error), open_own_file(name, folder) as file:
        magic, offset, size, digest = HEAD.unpack(file.read(HEAD.size))
        if magic == MAGIC and offset + size == os.fstat(file.fileno()).st_size:
            file.seek(offset)
            text = file.read(size)
            if hashlib.sha256(text).digest() == digest:
                return parse_json(text)
    return None


def _compare(record: Mapping[str, Any], abstract: Mapping[str, Any], fingerprints: Mapping[str, str]) -> None:
    """Raises ValueError unless fingerprints, names, shapes and dtypes match this run."""
    saved = {name: (leaf['dtype'], tuple(leaf['shape'])) for name, leaf in record['leaves'].items()}
    if saved != {name: (jax.numpy.dtype(leaf.dtype).name, tuple(leaf.shape)) for name, leaf in abstract.items()}:
        raise ValueError('the arrays are others')
    if record['fingerprints'] != dict(fingerprints):
        raise ValueError('the data or the tokenizer are others')


def _read(file: BinaryIO, name: str, target: Any, parts: Mapping[tuple, tuple]) -> jax.Array:
    """Reads the parts of an array that this process's devices need. Raises ValueError if there are others."""
    shape, dtype = tuple(target.shape), jax.numpy.dtype(target.dtype)
    sharding = getattr(target, 'sharding', None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    read: dict[str, np.ndarray] = {}
    shards = []
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        if (key := str(index)) not in read:
            if (name, key) not in parts:
                raise ValueError('the parts of the devices are others')
            offset, size = parts[name, key]
            file.seek(offset)
            data = np.fromfile(file, np.uint8, size)
            read[key] = data.view(dtype).reshape(sharding.shard_shape(shape))
        shards.append(jax.device_put(read[key], device))
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _write_all(file: Any, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]
