"""metrics.jsonl: one JSON object per logged step, in the order of the steps, each step once even after a restart.

JSON has no numbers for what is not finite: they are written as the strings 'NaN', 'Infinity' and '-Infinity'.

Each checkpoint seals the lines before it with their count and their SHA-256. So a digit that is changed later is seen.
"""

import contextlib
import hashlib
import io
import itertools
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from lm.errors import writing
from lm.files import JsonObject, is_remote, parse_json, read_bytes, write_atomically
from lm.trackers.base import Trackers

REMOTE_SECONDS = 60.0
"""Object stores cannot append: there the whole file is written again after so long, and on flush and close."""

log = logging.getLogger(__name__)


class MetricsFile(contextlib.AbstractContextManager['MetricsFile']):
    """Appends records to `path`. A context manager. All processes make and use it alike, process 0 alone writes.

    Args:
        path: the file; created if absent.
        resume_at: lines of later steps are removed first, as is a last line that was cut off by a crash.
        trackers: get each record too, and at first those that stay.
        may_write: asked before an object store gets the file; False where the run is another job's by now.
    """

    def __init__(
        self,
        path: epath.PathLike,
        resume_at: int = 0,
        trackers: Trackers | None = None,
        may_write: Callable[[], bool] = lambda: True,
    ):
        self.path, self._may_write = epath.Path(path), may_write
        self._leader = jax.process_index() == 0
        self._remote = is_remote(self.path)
        self._file: io.FileIO | None = None
        self._lines: list[str] = []
        self._unwritten = False
        self._last_write = time.monotonic()
        self._evaluated: set[int] = set()
        self._trackers = trackers
        self.count = 0
        """The lines that the file has; on processes other than the first, the lines of this process."""
        self._sha256 = hashlib.sha256()
        self._begun_with: list[str] = []
        if self._leader:
            lines = self._begun_with = self._keep(resume_at)
            self.count = len(lines)
            self._sha256.update(''.join(lines).encode())
            if trackers:
                trackers.begin(lambda: map(json.loads, lines))
            if self._remote:
                self._lines = list(lines)
            else:
                with writing(self.path):
                    self._file = open(self.path, 'ab', buffering=0)  # noqa: SIM115 (closed by close)
        if jax.process_count() > 1:
            known = int(multihost_utils.broadcast_one_to_all(np.int32(resume_at in self._evaluated)))
            self._evaluated = {resume_at} if known else set()

    def write(self, record: Mapping[str, Any]) -> None:
        """Adds one line. `kind` and `step` are required; numpy and jax scalars become numbers."""
        if record['kind'] == 'eval':
            self._evaluated.add(record['step'])
        self.count += 1
        if not self._leader:
            return
        line = json.dumps(to_plain(record), allow_nan=False) + '\n'
        self._sha256.update(line.encode())
        if self._remote:
            self._lines.append(line)
            self._unwritten = True
            if time.monotonic() - self._last_write > REMOTE_SECONDS:
                self.flush()
        elif self._file:
            self._append(self._file, line.encode())
        if self._trackers:
            self._trackers.write(record)

    def has_evaluation(self, step: int) -> bool:
        """Returns whether the file has an evaluation of `step`, which is `resume_at` or later."""
        return step in self._evaluated

    def seal(self) -> JsonObject:
        """Returns the entries of a checkpoint that tell later whether the lines of the file are the same."""
        return {'metrics_lines': self.count, 'metrics_sha256': self._sha256.hexdigest()}

    def warn_of_change(self, step: int, saved: Mapping[str, object]) -> None:
        """Warns if lines are gone or changed since the checkpoint of `step` sealed them in the entries `saved`."""
        change = find_change([line.encode() for line in self._begun_with], {step: saved})
        if self._leader and change:
            log.warning('%s: %s; the run goes on with what is there', self.path, change)
        self._begun_with = []

    def flush(self) -> None:
        """Returns when all lines are on the disk, or in the object store. Call it before a checkpoint is saved."""
        if self._file:
            with writing(self.path):
                os.fsync(self._file.fileno())
        if self._unwritten and self._may_write():
            with writing(self.path):
                write_atomically(self.path, ''.join(self._lines))
            self._unwritten = False
            self._last_write = time.monotonic()

    def close(self) -> None:
        self.flush()
        if self._file:
            self._file.close()

    def __exit__(self, *_) -> None:
        self.close()

    def _append(self, file: io.FileIO, line: bytes) -> None:
        """Appends the whole line or nothing: a full disk may have taken a part of it."""
        size = os.fstat(file.fileno()).st_size
        with writing(self.path):
            try:
                while line:
                    line = line[file.write(line) :]
            except OSError:
                os.truncate(file.fileno(), size)
                raise

    def _keep(self, resume_at: int) -> list[str]:
        """Returns the lines that stay. Replaces the file if any go, and keeps a copy if some were damaged."""
        kept: list[bytes] = []
        damaged: list[int] = []
        seen: set[tuple[str, int]] = set()
        count = 0
        for line, record in read_records(self.path):
            count += 1
            if not line.endswith(b'\n'):
                break  # the last one, cut off by a crash
            if record is None or (record['kind'], record['step']) in seen:
                damaged.append(count)
            elif record['step'] <= resume_at:
                kept.append(line)
                seen.add((record['kind'], record['step']))
                if record['kind'] == 'eval':
                    self._evaluated.add(record['step'])
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if damaged:
                copy = self.path.with_name(f'{self.path.name}.damaged')
                write_atomically(copy, read_bytes(self.path))
                more = f' (and {len(damaged) - 1} more)' if damaged[1:] else ''
                log.warning(
                    '%s: line %d%s is not a record of a new step and is removed; the whole file is kept as %s',
                    *(self.path, damaged[0], more, copy.name),
                )
            if len(kept) != count:
                write_atomically(self.path, b''.join(kept))
        return [line.decode() for line in kept]


def find_change(lines: Iterable[bytes], seals: Mapping[int, Mapping[str, Any]]) -> str | None:
    """Says which of the lines are gone, or are not what a checkpoint sealed; None: all are as they were.

    Args:
        seals: step → the entries of `MetricsFile.seal` in its checkpoint; older checkpoints have none.
    """
    rest, found, sound, running = iter(lines), 0, 0, hashlib.sha256()
    for step, seal in sorted(seals.items()):
        count, digest = seal.get('metrics_lines'), seal.get('metrics_sha256')
        if count is None:
            continue
        for line in itertools.islice(rest, max(0, count - found)):
            running.update(line)
            found += 1
        if found < count:
            gone = f'{count - found} of the {count} lines that it had when the checkpoint was saved are gone'
            return f'{gone} (step {step})'
        if digest is None or found > count:  # after a rewind a later checkpoint may have fewer lines
            continue
        if running.hexdigest() != digest:
            which = f'one of its lines {sound + 1} to {count}' if count > sound + 1 else f'its line {count}'
            return f'{which} has changed since the checkpoint of step {step} was saved'
        sound = count
    return None


def read_lines(path: epath.Path) -> Iterator[bytes]:
    """Yields the lines of a file, which may be long; none if it is missing."""
    if not path.exists():
        return
    if is_remote(path):
        yield from read_bytes(path).splitlines(keepends=True)
        return
    with open(path, 'rb') as file:
        yield from file


def read_records(path: epath.Path) -> Iterator[tuple[bytes, JsonObject | None]]:
    """Yields each line with its record: an object with a `kind` and a `step`; None for any other line."""
    return ((line, _parse(line)) for line in read_lines(path))


def _parse(line: bytes) -> JsonObject | None:
    try:
        record = parse_json(line.decode())
        valid = isinstance(record['kind'], str) and type(record['step']) is int and record['step'] >= 0
        return record if valid else None
    except (ValueError, KeyError, TypeError):
        return None


def to_plain(value: Any) -> Any:
    """Returns `value` as JSON can hold it: arrays become lists, and numbers that are not finite become strings."""
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(v) for v in value]
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        return to_plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return 'NaN' if math.isnan(value) else 'Infinity' if value > 0 else '-Infinity'
    return value
