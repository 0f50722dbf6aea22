"""The tools of the battery: run shapes, sessions of `lm train` in separate processes, and comparisons.

Two runs are equal if all arrays of their last checkpoints have the same bytes, and all lines of metrics.jsonl agree
except for times.
"""

import dataclasses
import functools
import hashlib
import json
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import tensorstore as ts
import tiny
from etils import epath
from warm import Nursery, Warm

from lm.checkpoint.snapshot import Snapshot, find_steps

TIMES = ('tokens_per_second', 'mfu', 'seconds', 'data_wait_seconds')
HEARTBEAT, JOIN = 10.0, 60.0
LIMIT = 240.0
"""Seconds that a session may take before it counts as hanging."""
LAUNCHERS = pathlib.Path(__file__).parent / 'launchers.py'


BRAKE = ('slow', '0.1')
"""The launcher of a run that a signal must hit at a certain step, on an idle or a loaded machine."""


class Failed(Exception):
    """The error of a run that did something it must not do."""


def need(truth: object, message: object) -> None:
    if not truth:
        raise Failed(str(message)[-1500:])


@dataclasses.dataclass(frozen=True)
class Shape:
    """The properties that determine an undisturbed run."""

    attention: str = ''
    devices: int = 1
    processes: int = 1
    bindings: tuple[tuple[str, object], ...] = ()
    steps: int = 40

    def __str__(self) -> str:
        words = [self.attention or 'default', f'{self.processes}×{self.devices} devices']
        return ', '.join(words + [f'{name.partition(".")[2]}={value}' for name, value in self.bindings])


class Session:
    """One start of a command, in one process or several; a thread reads the output while it comes."""

    def __init__(self, processes: list[subprocess.Popen] | list[Warm]):
        self.begin = time.monotonic()
        self.lines: list[list[tuple[float, str]]] = [[] for _ in processes]
        self.processes = processes
        self.readers = [threading.Thread(target=self._read, args=(i,), daemon=True) for i in range(len(processes))]
        for reader in self.readers:
            reader.start()

    def _read(self, index: int) -> None:
        for line in self.processes[index].stdout:
            self.lines[index].append((time.monotonic(), line))

    def wait_for(self, words: str, timeout: float = LIMIT) -> bool:
        """Returns whether a process prints `words` before it ends; one space in them stands for any number of
        spaces."""
        end, seen = time.monotonic() + timeout, [0] * len(self.lines)
        while time.monotonic() < end:
            is_over = all(p.poll() is not None for p in self.processes)
            for i, lines in enumerate(self.lines):
                if any(words in ' '.join(line.split()) for _, line in lines[seen[i] :]):
                    return True
                seen[i] = max(0, len(lines) - 1)
            if is_over:
                return False
            time.sleep(0.005)
        raise Failed(f'{words!r} was not said within {timeout:.0f} s:\n{self.output()}')

    def send(self, how: signal.Signals, index: int | None = None) -> None:
        """Sends a signal to one process, or to all."""
        for process in self.processes if index is None else [self.processes[index]]:
            process.send_signal(how)

    def end(self, timeout: float = LIMIT) -> int:
        """Waits; returns the first exit code that is not 0, or 0."""
        last = time.monotonic() + timeout
        try:
            for process in self.processes:
                process.wait(max(0.1, last - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise Failed(f'hangs for {timeout:.0f} s:\n{self.output()}') from None
        finally:
            self.kill()
        return next((p.returncode for p in self.processes if p.returncode), 0)

    def kill(self) -> None:
        for process, reader in zip(self.processes, self.readers, strict=True):
            process.kill()
            process.wait()
            reader.join(10)

    def output(self) -> str:
        return ''.join(line for lines in self.lines for _, line in list(lines))[-4000:]

    def first(self, words: str) -> float | None:
        """Returns the seconds from the start to the first line of process 0 with `words`."""
        return next((when - self.begin for when, line in self.lines[0] if line.startswith(words)), None)

    def resumed_from(self) -> int | None:
        return next((int(line.split()[3]) for _, line in self.lines[0] if line.startswith('resumed from step')), None)

    def codes(self) -> list[int]:
        return [p.returncode for p in self.processes]


class Workshop:
    """A folder with a token store, compiled programs that all runs share, and an undisturbed run of each shape.

    With a `nursery`, trainings start warm unless they are `cold`.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.nursery: Nursery | None = None
        self.cache = folder / 'programs'
        self.tokens = tiny.prepare(folder / 'data', 20_000)
        self._locks: dict[Shape, threading.Lock] = {}
        self._lock = threading.Lock()
        self._count, self._session = 0, time.time_ns()

    def place(self, name: str) -> pathlib.Path:
        """Returns a path where no file is yet."""
        with self._lock:
            self._count += 1
            return self.folder / f'{self._session}-{self._count}-{name}' / 'run'

    def flags(self, shape: Shape, **changes) -> list[str]:
        bindings = tiny.MODEL | {
            'data.path': str(self.tokens),
            'train.steps': shape.steps,
            'train.eval_every': shape.steps // 2,
            'train.tensorboard': False,
        }
        if shape.attention:
            bindings['model.attention'] = f'@{shape.attention}()'
        if shape.processes > 1:
            bindings |= {'mesh.heartbeat_seconds': HEARTBEAT, 'mesh.join_seconds': JOIN}
        named = {name.replace('__', '.'): value for name, value in changes.items()}
        return tiny.params(bindings | dict(shape.bindings) | named)

    def environment(self, devices: int = 1) -> dict[str, str]:
        """Returns the variables of all processes."""
        return tiny.environment(
            devices,
            PYTHONUNBUFFERED='1',
            JAX_COMPILATION_CACHE_DIR=str(self.cache),
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS='0',
            JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES='-1',
        )

    def session(self, commands: list[list[str]], devices: int = 1) -> Session:
        """Starts processes from scratch."""
        return Session(
            [
                subprocess.Popen(
                    command,
                    env=self.environment(devices),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors='replace',
                    cwd=tiny.ROOT,
                    start_new_session=True,  # a Ctrl-C to the battery must not reach them
                )
                for command in commands
            ]
        )

    def start(
        self,
        shape: Shape,
        run: pathlib.Path,
        *extra: str,
        launcher: tuple[str, ...] = (),
        cold: bool = False,
        **changes,
    ) -> Session:
        """Starts `lm train` in a directory; `launcher` names a function of `launchers.py` and its arguments."""
        arguments = ['train', '--run_dir', str(run), *self.flags(shape, **changes), *extra]
        jobs = [arguments]
        if shape.processes > 1:
            address = f'localhost:{tiny.free_port()}'
            arguments += ['--coordinator_address', address, '--process_count', str(shape.processes)]
            jobs = [[*arguments, '--process_id', str(i)] for i in range(shape.processes)]
        if self.nursery and not cold:
            # With other flags, warm and cold programs differ in the last bit.
            flags = self.environment(shape.devices)['XLA_FLAGS']
            return Session([self.nursery.start([*launcher, '--', *job], flags) for job in jobs])
        program = [sys.executable, str(LAUNCHERS), *launcher, '--'] if launcher else [sys.executable, '-m', 'lm.cli']
        return self.session([[*program, *job] for job in jobs], shape.devices)

    def finish(self, shape: Shape, run: pathlib.Path, *extra: str, **options) -> Session:
        """Runs a session that must reach the last step."""
        session = self.start(shape, run, *extra, **options)
        code = session.end()
        need(code == 0, f'exit code {code} instead of 0:\n{session.output()}')
        return session

    def hit(
        self, shape: Shape, run: pathlib.Path, words: str, how: signal.Signals, index: int | None = None
    ) -> tuple[Session, int]:
        """Runs a session and sends it a signal once it prints `words` ('': once it has a handler).

        Returns the session and the newest step that was logged then. Steps take BRAKE seconds, so the session can
        finish first only if this process stands still for seconds. The session is then repeated.
        """
        aside = run.parent / 'before'
        for _ in range(3):
            if run.exists():
                shutil.copytree(run, aside)
            session = self.start(shape, run, launcher=BRAKE if words else ())
            if words:
                need(session.wait_for(words), f'{words!r} was never said:\n{session.output()}')
            else:
                while not catches(session.processes[0], how):
                    time.sleep(0.01)
            session.send(how, index)
            newest = logged(run)
            session.end()
            if any(session.codes()):
                shutil.rmtree(aside, ignore_errors=True)
                return session, newest
            shutil.rmtree(run)
            if aside.exists():
                aside.rename(run)
        raise Failed(f'3 times quicker than {how.name} at {words!r}')

    def lm(self, *arguments: str, devices: int = 1) -> Session:
        """Runs any `lm` command to its end."""
        session = self.session([[sys.executable, '-m', 'lm.cli', *arguments]], devices)
        session.end()
        return session

    def reference(self, shape: Shape) -> pathlib.Path:
        """Returns the undisturbed run of a shape; the first call makes it."""
        name = hashlib.sha256(repr(shape).encode()).hexdigest()[:16]
        run = self.folder / f'reference-{name}' / 'run'
        with self._lock:
            lock = self._locks.setdefault(shape, threading.Lock())
        with lock:
            if not (run.parent / 'done').exists():
                shutil.rmtree(run, ignore_errors=True)
                self.finish(shape, run)
                (run.parent / 'done').touch()
        return run

    def copy(self, shape: Shape, name: str) -> pathlib.Path:
        """Returns a copy of the undisturbed run."""
        return shutil.copytree(self.reference(shape), self.place(name))

    def same_end(self, shape: Shape, run: pathlib.Path) -> None:
        """Raises Failed unless the run has ended like the undisturbed run."""
        compare(run, self.reference(shape), shape.steps)


def catches(process: subprocess.Popen, how: signal.Signals) -> bool:
    """Returns whether a process has a handler for this signal, or is gone."""
    try:
        status = pathlib.Path(f'/proc/{process.pid}/status').read_text()
    except OSError:
        return True
    mask = next((line.split()[1] for line in status.splitlines() if line.startswith('SigCgt')), 'f' * 16)
    return bool(int(mask, 16) >> (how - 1) & 1)


def metrics(run: pathlib.Path) -> list[dict]:
    """Returns the lines of metrics.jsonl, without times."""
    text = (run / 'metrics.jsonl').read_text()
    need(text.endswith('\n'), 'metrics.jsonl: the last line has no end')
    records = [json.loads(line) for line in text.splitlines()]
    return [{name: value for name, value in record.items() if name not in TIMES} for record in records]


def arrays(run: pathlib.Path, step: int) -> dict[str, np.ndarray]:
    """Returns name → array of all leaves of a checkpoint; raises if a checksum does not match."""
    snapshot = Snapshot(epath.Path(run / 'checkpoints'), step)
    record = snapshot.record()
    abstract = {n: jax.ShapeDtypeStruct(x['shape'], jax.numpy.dtype(x['dtype'])) for n, x in record['leaves'].items()}
    return {name: np.asarray(x) for name, x in snapshot.read(abstract, record).items()}


@functools.lru_cache(64)
def contents(run: pathlib.Path, step: int) -> tuple[dict, dict[str, bytes]]:
    """Returns the entries of each array in a checkpoint's record, with checksums, and the bytes."""
    kvstore = {'driver': 'ocdbt', 'base': {'driver': 'file', 'path': f'{run}/checkpoints/{step}/state/'}}
    leaves = Snapshot(epath.Path(run / 'checkpoints'), step).record()['leaves']
    specs = {name: {'driver': 'zarr', 'kvstore': kvstore | {'path': f'{name}/'}} for name in leaves}
    reads = {name: ts.open(spec, open=True).result().read() for name, spec in specs.items()}
    return leaves, {name: read.result().tobytes() for name, read in reads.items()}


def compare(ours: pathlib.Path, theirs: pathlib.Path, step: int) -> None:
    """Raises Failed for the first difference between two finished runs."""
    a, b = metrics(ours), metrics(theirs)
    need([(r['kind'], r['step']) for r in a] == [(r['kind'], r['step']) for r in b], f'{ours}: other lines of metrics')
    for one, two in zip(a, b, strict=True):
        need(one == two, f'{ours}: metrics differ:\n{one}\n{two}')
    need(saved(ours)[-1:] == [step], f'{ours}: checkpoints {saved(ours)} do not end with {step}')
    (our_leaves, our_bytes), (leaves, wanted) = contents.__wrapped__(ours, step), contents(theirs, step)
    need(our_leaves == leaves, f'{ours}: the records differ: {our_leaves}\n{leaves}')
    for name in wanted:
        need(our_bytes[name] == wanted[name], f'{ours}: {name} differs')
    need(not (ours / 'lock.json').exists(), f'{ours}: the lock is still there')


def compare_arrays(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    need(a.keys() == b.keys(), f'other arrays: {a.keys() ^ b.keys()}')
    for name in a:
        need(a[name].dtype == b[name].dtype and a[name].tobytes() == b[name].tobytes(), f'{name} differs')


def saved(run: pathlib.Path) -> list[int]:
    """Returns the complete checkpoints."""
    folder = epath.Path(run / 'checkpoints')
    return [step for step in find_steps(folder) if Snapshot(folder, step).is_committed()]


def logged(run: pathlib.Path) -> int:
    """Returns the newest step of metrics.jsonl, whose last line may be cut off."""
    newest = 0
    path = run / 'metrics.jsonl'
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            newest = max(newest, json.loads(line)['step'])
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return newest


def files(run: pathlib.Path, step: int) -> list[pathlib.Path]:
    """Returns the files of a checkpoint."""
    return sorted(path for path in (run / 'checkpoints' / str(step)).rglob('*') if path.is_file())


def damage(path: pathlib.Path, how: str, draw) -> bytes:
    """Flips a bit of a file, cuts it, empties or deletes it; returns its former content."""
    intact = path.read_bytes()
    if how == 'delete':
        path.unlink()
    elif how == 'flip' and intact:
        position = draw.randrange(8 * len(intact))
        wrong = bytearray(intact)
        wrong[position // 8] ^= 1 << position % 8
        path.write_bytes(wrong)
    else:
        path.write_bytes(intact[: draw.randrange(len(intact)) if how == 'truncate' and intact else 0])
    return intact
