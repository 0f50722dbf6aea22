"""Compiled programs that outlive the process: a restart of the same run compiles nothing again.

JAX's persistent compilation cache works in a private folder of this machine. It is filled from `folder` before the
first program is compiled, and `publish` copies new programs back. So nothing is written to a run directory before the
run is known to be sound, and buckets need no support by JAX. The name of a file holds its SHA-256, which JAX does not
check: a file that is cut off or damaged is found.

A program in the cache is code: whoever may write to `folder` may run code here. So a local folder is used only if it
belongs to this user or to root and nobody else may write to it. A bucket tells no owner: its permissions decide.
"""

import contextlib
import hashlib
import logging
import os
import platform
import shutil
import stat
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import jax
from etils import epath
from jax.experimental.compilation_cache import compilation_cache

from lm.files import is_remote, open_path, reaching, write_atomically

SUFFIX = '-cache'
"""The endings of JAX's names of programs."""
SETTINGS = {
    # Programs that compile faster are not worth a file.
    'jax_persistent_cache_min_compile_time_secs': 0.1,
    # Its path would become part of the names, and programs would not be found from another folder.
    'jax_persistent_cache_enable_xla_caches': 'none',
}
MOST_PROGRAMS = 64
"""The number of programs per folder. The oldest are deleted first, such as programs of another configuration."""

log = logging.getLogger(__name__)


class CompileCache:
    """A context manager inside which compiled programs are kept in `folder`, a local folder or a bucket.

    All processes of a job use it alike: each reads, process 0 alone writes. If the user has set up JAX's cache
    (JAX_COMPILATION_CACHE_DIR), that cache is used, and this one does nothing.

    Args:
        folder: made when the first program is published; None: no program is kept.
    """

    def __init__(self, folder: epath.PathLike | None):
        is_used = jax.config.values['jax_compilation_cache_dir'] is None
        self.folder = epath.Path(open_path(folder, '--compile_cache')) / _machine() if folder and is_used else None
        self._private: Path | None = None
        self._known: set[str] = set()
        self._damaged: list[epath.Path] = []

    def __enter__(self) -> 'CompileCache':
        if self.folder is not None:
            try:
                check_owner(self.folder.parent)
                check_owner(self.folder)
                self._private = _private_folder()
                with reaching(self.folder):
                    self._fetch(self.folder, self._private)
            except OSError as error:
                log.warning('no cache of compiled programs: %s', error)
                self.folder = None
        if self.folder is not None:
            self._before = {name: getattr(jax.config, name) for name in SETTINGS}
            for name, value in SETTINGS.items():
                jax.config.update(name, value)
            # A program that cannot be kept, for example on a full disk, only costs time.
            warnings.filterwarnings('ignore', 'Error (reading|writing) persistent compilation cache entry')
            self._use(str(self._private))
        return self

    def __exit__(self, *_) -> None:
        if self.folder is not None:
            self._use(None)
            for name, value in self._before.items():
                jax.config.update(name, value)
        if self._private is not None:
            shutil.rmtree(self._private, ignore_errors=True)

    def publish(self) -> None:
        """Copies new programs to the folder. A failure, such as a full disk, is a warning: it only costs time."""
        if self.folder is None or self._private is None or jax.process_index():
            return
        try:
            with reaching(self.folder):
                self._publish(self._private, self.folder)
        except OSError as error:
            log.warning('%s: the compiled programs could not be kept (%s)', self.folder, error)

    def _publish(self, private: Path, folder: epath.Path) -> None:
        while self._damaged:
            self._damaged.pop().unlink(missing_ok=True)
        new = [path for path in private.iterdir() if path.name not in self._known]
        if not new:
            return
        for place in (folder.parent, folder):
            if not place.exists():
                place.mkdir(parents=True, exist_ok=True)
                if not is_remote(place):
                    os.chmod(place, 0o755)  # the default may let a group write
        for path in new:
            data = path.read_bytes()
            # The checksum in the name finds what a crash of the machine cuts off.
            write_atomically(folder / f'{path.name}.{_digest(data)}', data, mode=0o644)
            self._known.add(path.name)
        files = sorted(_programs(folder), key=_read_time)
        for path in files[:-MOST_PROGRAMS]:
            path.unlink(missing_ok=True)

    def _fetch(self, folder: epath.Path, private: Path) -> None:
        for path in _programs(folder):
            name, _, digest = path.name.rpartition('.')
            try:
                check_owner(path)
                data = path.read_bytes()
            except FileNotFoundError:  # another process has deleted it meanwhile
                continue
            if _digest(data) != digest:
                log.warning('%s is damaged and not used: its program is compiled again', path)
                self._damaged.append(path)
                continue
            (private / name).write_bytes(data)
            self._known.add(name)

    @staticmethod
    def _use(path: str | None) -> None:
        jax.config.update('jax_compilation_cache_dir', path)
        compilation_cache.reset_cache()  # the first program has made it settle on a folder


def _programs(folder: epath.Path) -> Iterator[epath.Path]:
    for path in folder.iterdir() if folder.exists() else ():
        if path.name.rpartition('.')[0].endswith(SUFFIX):
            yield path


def _read_time(path: epath.Path) -> float:
    """Returns when a file was written; 0 if another process has deleted it meanwhile."""
    try:
        return path.stat().mtime
    except FileNotFoundError:
        return 0.0


def check_owner(path: epath.Path) -> None:
    """Raises OSError for a local file or folder to which other users than this one and root may write."""
    if is_remote(path) or not os.path.lexists(path):
        return
    found = os.stat(path)
    if found.st_uid not in (os.getuid(), 0):
        raise PermissionError(
            f'{path} belongs to another user, who could run code here; name a --compile_cache of yours'
        )
    # In a folder such as /tmp nobody may replace the folders of others.
    shared = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not shared:
        raise PermissionError(f'others may write to {path} and run code here; chmod -R go-w {path}')


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def _private_folder() -> Path:
    """Makes a folder that only this user reads, and deletes the folders of processes that were killed."""
    for path in Path(tempfile.gettempdir()).glob('lm-compiled-*-*'):
        with contextlib.suppress(OSError, ValueError):
            if (
                path.is_dir()
                and path.stat().st_uid == os.getuid()
                and not Path('/proc', path.name.split('-')[2]).exists()
            ):
                shutil.rmtree(path, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f'lm-compiled-{os.getpid()}-'))


def _machine() -> str:
    """Returns a name of this kind of processor: programs for a CPU use its own instructions, so each kind gets a
    folder."""
    if jax.default_backend() != 'cpu':
        return jax.default_backend()
    with contextlib.suppress(OSError):
        lines = Path('/proc/cpuinfo').read_text().splitlines()
        features = [line for line in lines if line.startswith(('flags', 'Features', 'model name'))][:2]
        return f'cpu-{hashlib.sha256("".join(features).encode()).hexdigest()[:16]}'
    return f'cpu-{platform.machine()}'
