"""The checks of one place: a run directory, a token store, or a folder or bucket that a run is to write."""

import itertools
import math
import os
import pathlib
import socket
import stat
import statistics
import time
import uuid
from collections.abc import Callable, Iterator

from etils import epath

from lm.checkpoint.shared_memory import SharedMemory
from lm.checkpoint.snapshot import find_steps
from lm.compilation.cache import check_owner
from lm.data.store import TokenStore
from lm.doctor.finding import Examination, Finding, doubt, fine, wrong
from lm.files import is_remote, open_path, reaching
from lm.lease import is_held, read_silence
from lm.own_folder import own_folder
from lm.runs.paths import find_import
from lm.runs.records import is_run
from lm.runs.run_dir import RunDir
from lm.text import format_duration

PROBES = 3
"""The number of small files that are written, read and deleted."""
REMOTE_SECONDS = 240.0
"""A silent server ends each of several calls by itself (`lm.buckets`); this is the limit for all of them."""
SKEW_SECONDS = 5.0
"""The clocks of a machine and of its storage may differ by so much."""


def make_checks(path: str) -> list[Examination]:
    """Returns the checks of a place. Raises ConfigError for an address that no command reads."""
    place = epath.Path(open_path(path))
    seconds = REMOTE_SECONDS if is_remote(place) else 20.0

    def check(subject: str, examine: Callable[[epath.Path], Iterator[Finding]]) -> Examination:
        return Examination(subject, lambda: examine(place), seconds)

    # Checks of a server are one: after the first that has no answer, the others would wait as long.
    if is_remote(place):
        return [check('storage', lambda place: itertools.chain(check_storage(place), check_run(place)))]
    return [check('rights', check_rights), check('storage', check_storage), check('run', check_run)]


def check_rights(place: epath.Path) -> Iterator[Finding]:
    """Looks at the owner of a local folder, and for links and special files in it."""
    folder = pathlib.Path(place)
    if not folder.exists():
        return
    try:
        check_owner(place)
    except PermissionError as error:
        yield doubt('rights', f'{place}: others can change it', str(error).rpartition('; ')[2])
    odd = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            odd.append(f'{path.name} is a link to {os.readlink(path)}')
        elif not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            odd.append(f'{path.name} is a pipe or a device')
        elif path.lstat().st_uid not in (os.getuid(), 0):
            odd.append(f'{path.name} belongs to another user')
    if odd:
        more = f' (and {len(odd) - 1} more)' if odd[1:] else ''
        yield doubt('rights', f'{place}: {odd[0]}{more}', 'make sure that this is meant')
    else:
        yield fine('rights', f'{place}: yours, without links')


def check_storage(place: epath.Path) -> Iterator[Finding]:
    """Writes, reads and deletes small files, and compares the clock of the storage with the clock of this machine."""
    target = place
    if not is_remote(place):
        target = next(path for path in (place, *place.parents) if path.is_dir())
    if (place / 'dataset.json').exists():
        yield fine('storage', f'{place} holds tokens, and is only read')
        return
    seconds, skew = [], math.inf
    for _ in range(PROBES):
        probe = target / f'.lm-doctor-{socket.gethostname()}-{uuid.uuid4().hex[:8]}'
        begun, since = time.time(), time.monotonic()
        with reaching(target):
            probe.write_text('lm')
            try:
                content, written = probe.read_text(), probe.stat().mtime
            finally:
                probe.unlink()
        seconds.append(time.monotonic() - since)
        if content != 'lm':
            yield wrong('storage', f'{target} gives back another content than it was given', 'use another storage')
            return
        skew = min(skew, written - begun, key=abs)
    yield fine('storage', f'{target} can be written: {1000 * statistics.median(seconds):.0f} ms per small file')
    if abs(skew) > SKEW_SECONDS:
        yield doubt('clock', f'the clock of {target} differs by {skew:+.0f} s', 'set the clock of this machine')
    else:
        yield fine('clock', f'the clock of {target} agrees')


def check_run(place: epath.Path) -> Iterator[Finding]:
    """Looks at a run: its owner at work, its newest checkpoint, its data, and its folder in memory."""
    with reaching(place):
        if (place / 'dataset.json').exists():
            store = TokenStore.open(str(place))
            yield fine('store', f'{place}: {", ".join(f"{store.tokens(name):,} in {name}" for name in store.splits)}')
            return
        if command := find_import(place):
            yield fine('run', f'{place} holds weights and no run; to make a run of them: {command}')
            return
        if not is_run(place):
            return
    run = RunDir(place, found=True)
    silence, is_busy = read_silence(run.path), is_held(run.path)
    if is_busy:
        yield fine('run', 'a training is at work in it; a second one will be refused')
    elif silence is not None:
        yield doubt(
            'run',
            f'its last training ended without giving back its lock, {format_duration(silence)} ago',
            'nothing to do: the next lm train takes the lock over',
        )
    if steps := find_steps(run.checkpoints):
        yield fine('run', f'its newest checkpoint is step {max(steps)}, of {len(steps)}')
    else:
        yield doubt('run', 'it has no checkpoint yet', 'lm train begins it anew')
    folder = SharedMemory(run.path, '').folder
    try:
        with own_folder(folder):
            yield fine('run', f'{folder} is yours alone')
    except FileNotFoundError:
        pass
    except OSError as error:
        yield wrong('run', f'{folder}: {error.strerror or error}', f'find out who made it: ls -ld {folder}')
