"""lock.json: one training at a time writes a run directory.

The file names its owner and is renewed while the owner lives. TensorStore's conditional writes are atomic on local
disks, gs:// and s3://: of two processes that come at once, one gets the lock.

A process that finds a lock asks whether its owner is dead. On the same host the process table answers at once, as does
a reboot since. From another host the lock is watched, and is taken over if it is not renewed for EXPIRES seconds.
Differing clocks do no harm, because the watching itself lasts over two renewals. A lock that was copied with its run
names the inode of another folder, and is watched too.

The answer to a write may be lost on its way. The repeated write then fails, because the lock is already there. A
process that is refused therefore reads whose lock it is; each object signs its own.
"""

import contextlib
import datetime
import json
import logging
import math
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import jax
import tensorstore as ts
from etils import epath

from lm.errors import ConfigError, LmError
from lm.files import folder_spec, is_remote, parse_json, reaching, read_bytes, waiting_for
from lm.runs.process_zero import broadcast_text, check_all, run_on_process_zero
from lm.signals import last_act
from lm.text import make_visible

NAME = 'lock.json'
HEARTBEAT = 10.0
"""Seconds between two renewals."""
EXPIRES = 60.0
"""Seconds without a renewal after which the lock of another host counts for nothing."""
MOST_SECONDS = 1e11
"""A limit for times since the epoch: later ones, infinity and NaN are none."""
SEES = 30.0
"""Seconds that a shared disk may take to show one host what another has written."""

log = logging.getLogger(__name__)


class OccupiedError(ConfigError):
    """Another training is at work in the run directory. The refused one may be right in all else."""


class RunLock:
    """A context inside which this job alone writes `directory`; process 0 holds the lock for all its processes.

    Raises OccupiedError on entry where another training is alive, before anything is written. Raises ConfigError where
    a process does not find the lock, because each host has a disk of its own: the first checkpoint would wait for its
    parts in vain. Raises LmError where the lock cannot be written. The end removes the lock, and a directory that was
    made for it alone.
    """

    def __init__(self, directory: epath.Path):
        self.directory = directory
        self._spec = folder_spec(directory)
        self._owner = {
            'host': socket.gethostname(),
            'pid': os.getpid(),
            'pid_started': _start_of(os.getpid()),
            'pid_namespace': _pid_namespace(),
            'boot': _boot(),
            'since': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
            'uuid': uuid.uuid4().hex,
        }
        self._generation: bytes | None = None
        self._lost: str | None = None
        self._over = threading.Event()
        self._writing = threading.Lock()
        self._heart = threading.Thread(target=self._renew, name='run-lock', daemon=True)
        self._ending = last_act(self._release)

    def __enter__(self) -> 'RunLock':
        run_on_process_zero(self._take)
        if self._generation is not None:
            self._heart.start()
            self._ending.__enter__()
        try:
            check_all(self._why_not_seen(broadcast_text(self._owner['uuid'])))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        if self._generation is None:
            return
        self._ending.__exit__(None, None, None)
        self._over.set()
        self._heart.join()
        self._release()
        if not is_remote(self.directory):
            with contextlib.suppress(OSError):
                os.rmdir(self.directory)  # only if nothing else was written

    def _why_not_seen(self, uuid: str) -> str | None:
        """Explains why this process does not see the lock of process 0; None: it does."""
        end = time.monotonic() + SEES
        while uuid != self._owner['uuid']:
            with contextlib.suppress(OSError):
                if _parse(read_bytes(self.directory / NAME)).get('uuid') == uuid:
                    break
            if time.monotonic() > end:
                return (
                    f'--run_dir {self.directory}: process {jax.process_index()}, on {socket.gethostname()}, does not '
                    'find there what process 0 writes; name a folder that all hosts share, such as gs://BUCKET/runs/NAME'
                )
            time.sleep(0.5)
        return None

    @property
    def is_lost(self) -> bool:
        """True if the lock is known to be another's, or gone."""
        return self._lost is not None

    def check(self) -> None:
        """Raises ConfigError if the lock is another's by now, because this process was suspended for longer than
        EXPIRES, or gone with its folder."""
        if self._lost:
            raise ConfigError(f'--run_dir {self.directory}: {self._lost}; nothing more is written here')

    def _release(self) -> None:
        """Removes the lock, if it is still this object's, and nobody renews it after that."""
        self._over.set()
        with self._writing, contextlib.suppress(ValueError):
            if generation := self._read_generation():
                self._store.write(NAME, None, if_equal=generation).result()

    def _take(self) -> bool:
        watched, deadline = None, 0.0
        try:
            self._store = ts.KvStore.open(self._spec).result()
            while True:
                with waiting_for(self.directory):
                    found = self._store.read(NAME).result()
                if self._is_held(found):  # the write below had succeeded after all
                    self._generation = found.stamp.generation
                    return True
                if found.state == 'value':
                    owner = _parse(found.value)
                    alive = _is_alive(owner, self.directory)
                    renewed = watched is not None and watched != found.stamp.generation
                    if alive or (alive is None and renewed):
                        raise OccupiedError(
                            f'--run_dir {self.directory}: {_name(owner)} trains in it; wait for it or end it, or '
                            'choose another --run_dir'
                        )
                    if alive is None and watched is None:
                        age = time.time() - owner.get('renewed', 0.0)
                        watched = found.stamp.generation
                        wait = max(2.5 * HEARTBEAT, EXPIRES - max(0.0, age))
                        deadline = time.monotonic() + wait
                        log.warning(
                            '%s holds the lock of %s: watching it for %.0f s', _name(owner), self.directory, wait
                        )
                    if alive is None and time.monotonic() < deadline:
                        time.sleep(HEARTBEAT / 10)
                        continue
                    log.warning('%s ended without giving back %s: taken over', _name(owner), self.directory / NAME)
                self._generation = self._write(found.stamp.generation) or None
                if self._generation:
                    return True
        except (ValueError, OSError) as error:
            raise LmError(
                f'--run_dir {self.directory}: its {NAME} cannot be written ({_one_line(error)}); '
                'make room, or choose a directory that can be written to'
            ) from None

    def _write(self, generation: bytes) -> bytes:
        """Renews the lock and returns its generation; b'' if the lock there was not `generation`."""
        text = json.dumps(self._owner | {'inode': _inode(self.directory), 'renewed': time.time()}, indent=2) + '\n'
        return self._store.write(NAME, text.encode(), if_equal=generation).result().generation

    def _is_held(self, found: ts.KvStore.ReadResult) -> bool:
        return found.state == 'value' and _parse(found.value).get('uuid') == self._owner['uuid']

    def _read_generation(self) -> bytes:
        """Returns the generation of the lock in its place; b'' if it belongs to another object."""
        found = self._store.read(NAME).result()
        return found.stamp.generation if self._is_held(found) else b''

    def _renew(self) -> None:
        warned = False
        while self._generation is not None and not self._over.wait(HEARTBEAT):
            try:
                with self._writing:
                    if self._over.is_set():
                        return
                    generation = self._write(self._generation)
                    if not generation and (generation := self._read_generation()):
                        # This write had succeeded, or an earlier one, which is old by now: once more.
                        generation = self._write(generation) or self._read_generation()
                    self._generation = generation or self._generation
            except ValueError as error:  # such as a full disk: others on this host still see that we live
                if not warned:
                    log.warning(
                        '%s could not be renewed: %s', self.directory / NAME, ' '.join(str(error).split())[:300]
                    )
                warned = True
                continue
            if not generation:
                self._lost = self._how_lost()
                return

    def _how_lost(self) -> str:
        """Explains what has become of the lock that this object has lost."""
        with contextlib.suppress(ValueError):
            if self._store.read(NAME).result().state == 'missing':
                return f'its {NAME} is gone: the folder was moved, emptied or taken over by a training that has ended'
        return 'another training took it over while this process stood still'


def is_occupied(directory: epath.Path) -> bool | None:
    """Returns whether a training of another process is at work there; None where that is unknown, as on another
    host."""
    try:
        with reaching(directory):
            data = read_bytes(directory / NAME)
    except OSError:
        return False
    return _is_alive(_parse(data), directory)


def read_silence(directory: epath.Path) -> float | None:
    """Returns the seconds since the training at work there last renewed its lock, by both hosts' clocks.

    None: there is no lock, because no training has begun or the last one ended in order.
    """
    try:
        with reaching(directory):
            owner = _parse(read_bytes(directory / NAME))
    except OSError:
        return None
    return max(0.0, time.time() - owner['renewed']) if 'renewed' in owner else None


def _one_line(error: Exception) -> str:
    return ' '.join(str(error).split())[:300]


def _name(owner: dict[str, Any]) -> str:
    if not owner:
        return 'a training whose lock cannot be read'
    return make_visible(f'process {owner["pid"]} on {owner["host"]}, started {owner["since"]},')


def _parse(data: bytes) -> dict[str, Any]:
    """Returns the owner, or {} where the file is damaged or not one of `RunLock`."""
    try:
        owner = parse_json(data)
    except ValueError:
        return {}
    if not isinstance(owner, dict):
        return {}
    texts = [owner.get(name) for name in ('host', 'since', 'boot')]
    texts += [owner.get(name) or '' for name in ('uuid', 'pid_started', 'pid_namespace')]
    pid, inode, renewed = owner.get('pid'), owner.get('inode', 0), owner.get('renewed', math.inf)
    is_whole = (
        all(isinstance(text, str) for text in texts)
        and isinstance(pid, int)
        and 0 < pid < 2**31
        and type(inode) in (int, type(None))
        and isinstance(renewed, int | float)
        and abs(renewed) < MOST_SECONDS
    )
    return owner if is_whole else {}


def _is_alive(owner: dict[str, Any], directory: epath.Path) -> bool | None:
    """Returns whether the owner lives and holds this directory; None where this process cannot know."""
    if owner.get('host') != socket.gethostname():
        return None
    if owner['boot'] != _boot():
        # Another machine may bear the same name: only a lock that is older than this machine's start is dead for sure.
        age = time.time() - owner['renewed']
        return False if age > max(2.5 * HEARTBEAT, _seconds_since_boot()) else None
    if owner.get('pid_namespace') != _pid_namespace():
        return None
    try:
        os.kill(owner['pid'], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    if _start_of(owner['pid']) != owner.get('pid_started'):
        return False
    # Some file systems give a folder new inodes: what is renewed counts all the same.
    return True if owner.get('inode') in (None, _inode(directory)) else None


def _inode(directory: epath.Path) -> int | None:
    """Returns the inode of a local directory, which a copy does not share; None where there is no inode yet."""
    try:
        return None if is_remote(directory) else os.stat(directory).st_ino
    except OSError:
        return None


def _start_of(pid: int) -> str | None:
    """Returns when a process started, in ticks since the boot, which distinguishes processes of one number. None: there
    is no /proc."""
    try:
        state, *rest = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()
    except OSError:
        return None
    return None if state in 'ZX' else rest[18]


def _pid_namespace() -> str:
    try:
        return os.readlink('/proc/self/ns/pid')
    except OSError:
        return ''


def _boot() -> str:
    try:
        return Path('/proc/sys/kernel/random/boot_id').read_text().strip()
    except OSError:
        return ''


def _seconds_since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, 'CLOCK_BOOTTIME') else 0.0
