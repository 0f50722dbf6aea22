"""One owner at a time: a file in a folder names the process that works there, and is renewed while the process lives.

TensorStore's conditional writes are atomic on local disks, gs:// and s3://: of two processes that come at once, one
gets the lease.

A process that finds a lease asks whether its owner is dead. On the same host the process table answers at once, as does
a reboot since. From another host the lease is watched, and is taken over if it is not renewed for EXPIRES seconds.
Differing clocks do no harm, because the watching itself lasts over two renewals. A lease that was copied with its
folder names the inode of another folder, and is watched too.

The answer to a write may be lost on its way. The repeated write then fails, because the lease is already there. A
process that is refused therefore reads whose lease it is; each object signs its own.
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

import tensorstore as ts

from lm.buckets import waiting_for
from lm.errors import ConfigError
from lm.files import AnyPath, JsonObject, find_entries, folder_spec, is_remote, local_path, reaching, read_bytes
from lm.signals import last_act
from lm.text import make_visible

NAME = 'lock.json'
"""The name of the file, where nothing else is said."""
HEARTBEAT = 10.0
"""Seconds between two renewals."""
EXPIRES = 60.0
"""Seconds without a renewal after which the lease of another host counts for nothing."""
MOST_SECONDS = 1e11
"""A limit for times since the epoch: later ones, infinity and NaN are none."""

log = logging.getLogger(__name__)


class HeldError(ConfigError):
    """Another process holds the lease. `owner` describes that process."""

    def __init__(self, place: os.PathLike | str, owner: str):
        super().__init__(f'{place}: {owner} works there; wait for its end or stop it')
        self.owner = owner


class Lease:
    """A context inside which this object alone holds the file `name` in `folder`.

    Raises HeldError on entry where another owner is alive, before anything is written, and OSError where the file
    cannot be written. The end removes the file, and a folder that was made for it alone.

    Attributes:
        uuid: the signature of this object in the file.
        inherited: on entry, an owner had died without giving the lease back.
        lost: what has become of a lease that is known to be another's, or gone; None: nothing.
    """

    def __init__(self, folder: os.PathLike | str, name: str = NAME):
        self.folder = os.fspath(folder if is_remote(folder) else local_path(folder))
        self.name, self.uuid = name, uuid.uuid4().hex
        self.inherited, self.lost = False, None
        self._owner = {
            'host': socket.gethostname(),
            'pid': os.getpid(),
            'pid_started': _start_of(os.getpid()),
            'pid_namespace': _pid_namespace(),
            'boot': _boot(),
            'since': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
            'uuid': self.uuid,
        }
        self._generation: bytes | None = None
        self._told = False
        self._over = threading.Event()
        self._writing = threading.Lock()
        self._heart = threading.Thread(target=self._renew, name='lease', daemon=True)
        self._ending = last_act(self._release)

    @property
    def _file(self) -> str:
        return f'{self.folder}/{self.name}'

    def __enter__(self) -> 'Lease':
        try:
            if not is_remote(self.folder):
                os.makedirs(self.folder, exist_ok=True)
            self._store = ts.KvStore.open(folder_spec(self.folder)).result()
            self._take()
        except ValueError as error:  # of TensorStore
            raise OSError(_one_line(error)) from None
        self._heart.start()
        self._ending.__enter__()
        return self

    def __exit__(self, *_) -> None:
        self._ending.__exit__(None, None, None)
        self._over.set()
        self._heart.join()
        self._release()
        if not is_remote(self.folder):
            with contextlib.suppress(OSError):
                os.rmdir(self.folder)  # only if nothing else was written

    def _release(self) -> None:
        """Removes the file, if it is still this object's, and nobody renews it after that."""
        self._over.set()
        with self._writing, contextlib.suppress(ValueError):
            if generation := self._read_generation():
                self._store.write(self.name, None, if_equal=generation).result()

    def _take(self) -> None:
        watched, deadline = None, 0.0
        while not self._generation:
            with waiting_for(self.folder):
                found = self._store.read(self.name).result()
            if self._is_held(found):  # the write below had succeeded after all
                self._generation = found.stamp.generation
                return
            self.inherited = found.state == 'value'
            if self.inherited:
                owner = _parse(found.value)
                alive = _is_alive(owner, self.folder)
                if alive or (alive is None and watched not in (None, found.stamp.generation)):
                    raise HeldError(self.folder, _name(owner))
                if alive is None and watched is None:
                    watched = found.stamp.generation
                    deadline = time.monotonic() + self._choose_wait(owner)
                if alive is None and time.monotonic() < deadline:
                    time.sleep(HEARTBEAT / 10)
                    continue
                log.warning('%s ended without giving back %s: taken over', _name(owner), self._file)
            self._generation = self._write(found.stamp.generation)

    def _choose_wait(self, owner: JsonObject) -> float:
        """Returns the seconds for which an owner is watched, and says so once."""
        age = time.time() - owner.get('renewed', 0.0)
        wait = max(2.5 * HEARTBEAT, EXPIRES - max(0.0, age))
        if not self._told:
            log.warning('%s holds the lock of %s: watching it for %.0f s', _name(owner), self.folder, wait)
        self._told = True
        return wait

    def _write(self, generation: bytes) -> bytes:
        """Renews the lease and returns its generation; b'' if the lease there was not `generation`."""
        owner = self._owner | {'inode': _inode(self.folder), 'renewed': time.time()}
        text = json.dumps(owner, indent=2) + '\n'
        return self._store.write(self.name, text.encode(), if_equal=generation).result().generation

    def _is_held(self, found: ts.KvStore.ReadResult) -> bool:
        return found.state == 'value' and _parse(found.value).get('uuid') == self.uuid

    def _read_generation(self) -> bytes:
        """Returns the generation of the lease in its place; b'' if it belongs to another object."""
        found = self._store.read(self.name).result()
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
                    log.warning('%s could not be renewed: %s', self._file, _one_line(error))
                warned = True
                continue
            if not generation:
                self.lost = self._how_lost()
                return

    def _how_lost(self) -> str:
        with contextlib.suppress(ValueError):
            if self._store.read(self.name).result().state == 'missing':
                return f'its {self.name} is gone: the folder was moved, emptied or had another owner meanwhile'
        return 'another process took it over while this one stood still'


def read_owner(folder: AnyPath) -> JsonObject | None:
    """Returns what the lease of a folder says about its owner, {} where it is damaged; None: there is no lease."""
    try:
        with reaching(folder):
            return _parse(read_bytes(folder / NAME))
    except OSError:
        return None


def read_silence(folder: AnyPath) -> float | None:
    """Returns the seconds since the lease of a folder was last renewed, by both hosts' clocks.

    None: there is no lease, because nobody has begun or the last owner ended in order.
    """
    owner = read_owner(folder)
    return max(0.0, time.time() - owner['renewed']) if owner and 'renewed' in owner else None


def is_held(folder: AnyPath) -> bool:
    """Tells if a process holds the lease of a folder: one that lives on this host, or lately renewed it elsewhere."""
    owner = read_owner(folder)
    alive = False if owner is None else _is_alive(owner, folder)
    if alive is None:
        silence = read_silence(folder)
        alive = silence is not None and silence < EXPIRES
    return alive


def _one_line(error: Exception) -> str:
    return ' '.join(str(error).split())[:300]


def _name(owner: dict[str, object]) -> str:
    if not owner:
        return 'a process whose lock cannot be read'
    return make_visible(f'process {owner["pid"]} on {owner["host"]}, started {owner["since"]},')


def _parse(data: bytes) -> JsonObject:
    """Returns the owner, or {} where the file is damaged or not one of `Lease`."""
    owner = find_entries(data)
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


def _is_alive(owner: JsonObject, folder: os.PathLike | str) -> bool | None:
    """Returns whether the owner lives and holds this folder; None where this process cannot know."""
    if owner.get('host') != socket.gethostname():
        return None
    if owner['boot'] != _boot():
        # Another machine may bear the same name: only a lease that is older than this machine's start is dead for sure.
        age = time.time() - owner['renewed']
        started = time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, 'CLOCK_BOOTTIME') else 0.0
        return False if age > max(2.5 * HEARTBEAT, started) else None
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
    return True if owner.get('inode') in (None, _inode(folder)) else None


def _inode(folder: os.PathLike | str) -> int | None:
    """Returns the inode of a local folder, which a copy does not share; None where there is no inode yet."""
    try:
        return None if is_remote(folder) else os.stat(folder).st_ino
    except OSError:
        return None


def _read(path: str) -> str:
    """Returns the text of a file of the kernel; '' where there is none."""
    try:
        return Path(path).read_text()
    except OSError:
        return ''


def _start_of(pid: int) -> str | None:
    """Returns the ticks since the boot at which a process started; None: no such process, or no /proc."""
    fields = _read(f'/proc/{pid}/stat').rpartition(')')[2].split()
    return fields[19] if fields and fields[0] not in 'ZX' else None


def _pid_namespace() -> str:
    try:
        return os.readlink('/proc/self/ns/pid')
    except OSError:
        return ''


def _boot() -> str:
    return _read('/proc/sys/kernel/random/boot_id').strip()
