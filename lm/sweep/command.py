"""`lm sweep`: the points of a sweep file (`lm.sweep.points`), each a run of `lm train` in a directory of its own.

    ROOT/NAME/               the run directories
    ROOT/points/NAME.gin     the configuration of a point
    ROOT/points/NAME.log     what `lm train` printed, of all attempts (with a local ROOT)
    ROOT/points/NAME.json    how a point failed
    ROOT/sweep.json          the table of results

A point is finished when its last step is evaluated and saved: it is not run again. An interrupted one continues
exactly. One that diverged or does not fit its data (43, 44, 2) stays failed until --retry_failed; other failures are
tried again. Whatever becomes of a sweep, its points end with it: they save and exit when it dies.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

from etils import epath

from lm.errors import ConfigError, LmError, Preempted
from lm.files import is_remote, write_atomically
from lm.runs.records import Run, is_run, read_json, to_json
from lm.runs.run_dir import RunDir, check_path
from lm.sweep.points import Point, make_points
from lm.text import si

FINAL = (2, 43, 44)
"""Exit codes that the same command would give again."""
INTERRUPTED = (42, 130, 143, -signal.SIGTERM, -signal.SIGINT)
MEASURES = ('loss', 'perplexity', 'word_perplexity', 'bits_per_byte', 'accuracy', 'tokens_per_second')
POLL_SECONDS = 0.2
REPORT_SECONDS = 60.0


def main(_: Any, arguments: Any) -> int:
    """The `lm sweep` command."""
    if not arguments.sweep_file:
        raise ConfigError('--sweep_file: name a gin file whose values are lists')
    points = make_points(
        arguments.gin_file, arguments.sweep_file, arguments.gin_param, allow_imports=arguments.allow_gin_imports
    )
    if arguments.count:
        print(len(points))
        return 0
    if not arguments.run_dir:
        raise ConfigError('--run_dir: name the folder for the runs of the sweep')
    check_path(arguments.run_dir)
    sweep = Sweep(arguments.run_dir, points)
    sweep.check()
    if arguments.index is not None:
        return sweep.run_one(arguments)
    if arguments.coordinator_address or arguments.process_count is not None or arguments.process_id is not None:
        raise ConfigError('--coordinator_address: runs of several processes need --index, one point for all of them')
    print(f'{len(points)} points in {sweep.root}')
    for point in points:
        print(f'{point.index:>4}  {point.name}  [{sweep.result(point)["status"]}]')
    if arguments.dry_run:
        return 0
    return Runner(sweep, arguments).run()


class Sweep:
    """The points and what is known of them in the folder `root`, a local path or an address."""

    def __init__(self, root: epath.PathLike, points: list[Point]):
        self.root = epath.Path(root)
        if not is_remote(self.root):
            self.root = self.root.expanduser().absolute()
        self.is_local = not is_remote(self.root)
        self.points = points
        self.notes = self.root / 'points'

    def check(self) -> None:
        """Raises MismatchError if a directory holds a run of another configuration than the point of its name."""
        for point in self.points:
            RunDir(self.root / point.name).check_unchanged(point.config)

    def is_finished(self, point: Point) -> bool:
        path = self.root / point.name
        return is_run(path) and Run.read(path).is_finished()

    def result(self, point: Point) -> dict[str, Any]:
        """The row of a point: status done, failed, interrupted or waiting, and what was measured."""
        path, failure = self.root / point.name, read_json(self.notes / f'{point.name}.json') or {}
        row = {'index': point.index, 'point': point.name, 'settings': point.settings, 'run_dir': str(path)}
        row |= {'status': 'failed' if failure else 'waiting', 'step': 0, 'steps': point.experiment.train.steps}
        row |= dict.fromkeys(
            ('loss', 'perplexity', 'word_perplexity', 'bits_per_byte', 'accuracy', 'tokens_per_second')
        )
        row |= {'exit_code': failure.get('exit_code'), 'error': failure.get('error')}
        if is_run(path):
            run = Run.read(path)
            if run.is_finished():
                row |= {'status': 'done', 'exit_code': 0, 'error': None}
            elif not failure:
                row['status'] = 'interrupted'
            evaluation = run.last_evaluation or {}
            row |= {k: evaluation[k] for k in row.keys() & evaluation.keys() - {'step', 'steps'}}
            row |= {'step': run.step, 'tokens_per_second': run.tokens_per_second}
        return row

    def write_results(self) -> list[dict[str, Any]]:
        """Writes sweep.json from what the directories hold, and returns its rows."""
        rows = [self.result(point) for point in self.points]
        self.root.mkdir(parents=True, exist_ok=True)
        write_atomically(self.root / 'sweep.json', to_json({'kind': 'sweep', 'points': rows}) + '\n')
        return rows

    def prepare(self, point: Point) -> str:
        """Writes the configuration of a point, forgets its last failure, and returns the path of the file."""
        self.notes.mkdir(parents=True, exist_ok=True)
        path = self.notes / f'{point.name}.gin'
        write_atomically(path, point.config)
        (self.notes / f'{point.name}.json').unlink(missing_ok=True)
        return str(path)

    def record_failure(self, point: Point, exit_code: int, error: str) -> None:
        failure = {'exit_code': exit_code, 'error': error}
        write_atomically(self.notes / f'{point.name}.json', json.dumps(failure) + '\n')

    def run_one(self, arguments: Any) -> int:
        """Runs the point --index in this process, as `lm train` would, and keeps its exit code."""
        import jax

        from lm import train

        def leads() -> bool:
            return not jax.distributed.is_initialized() or jax.process_index() == 0

        if not 0 <= arguments.index < len(self.points):
            raise ConfigError(f'--index {arguments.index}: must be 0 to {len(self.points) - 1}')
        point = self.points[arguments.index]
        print(f'point {point.index} of {len(self.points)}: {point.name}')
        if self.is_finished(point):
            print('is finished already')
            return 0
        self.prepare(point)
        arguments.run_dir = str(self.root / point.name)
        try:
            code = train.main(point.experiment, arguments)
        except Exception as error:
            code = getattr(error, 'exit_code', 1)
            if code not in INTERRUPTED and leads():
                self.record_failure(point, code, ' '.join(str(error).split()))
            raise
        finally:
            if leads():
                self.write_results()
        return code


@dataclasses.dataclass
class Job:
    """A running point."""

    point: Point
    process: subprocess.Popen
    log: BinaryIO
    slot: int


class Runner:
    """Runs the points of a sweep as processes, a few at a time."""

    def __init__(self, sweep: Sweep, arguments: Any):
        if arguments.jobs < 1:
            raise ConfigError(f'--jobs {arguments.jobs}: must be at least 1')
        self.sweep = sweep
        self.slots = list(range(arguments.jobs))
        self.gpus_per_job = arguments.gpus_per_job
        if self.gpus_per_job:
            self._gpus(max(self.slots))  # refuses what is not there
        self.retry_failed = arguments.retry_failed
        self.waiting = [p for p in sweep.points if self._is_due(p)]
        self.running: list[Job] = []
        self.signals = 0
        self.held_up = False
        self._last_report = time.monotonic()

    def run(self) -> int:
        """Runs what is due; returns 0 when all points of the sweep are done.

        Raises:
            Preempted: the sweep, or one of its points, was told to stop.
            LmError: not all points succeeded.
        """
        self.sweep.write_results()
        with self._signals():
            while self.running or (self.waiting and not self.signals):
                if not self.signals:
                    self._start()
                for job in [job for job in self.running if job.process.poll() is not None]:
                    self._end(job)
                self._report()
                time.sleep(POLL_SECONDS)
        rows = self.sweep.write_results()
        from rich.console import Console

        Console(width=None if sys.stdout.isatty() else 160).print(results_table(rows))
        unfinished = [row for row in rows if row['status'] != 'done']
        if self.signals:
            raise Preempted(
                f'stopped with {len(unfinished)} of {len(rows)} points unfinished, what they did is saved: '
                'run the same command again'
            )
        if unfinished:
            raise LmError(
                f'{len(unfinished)} of {len(rows)} points did not succeed: '
                f'{", ".join(row["point"] for row in unfinished[:4])}{" …" if unfinished[4:] else ""}; '
                f'see {self.sweep.notes}'
            )
        return 0

    def _is_due(self, point: Point) -> bool:
        result = self.sweep.result(point)
        if result['status'] == 'failed' and result['exit_code'] in FINAL and not self.retry_failed:
            print(f'{point.name} failed with {result["exit_code"]} before and is left out (see --retry_failed)')
            return False
        return result['status'] != 'done'

    def _start(self) -> None:
        """Starts points while there are slots. Those that another process runs are kept for later."""
        for point in list(self.waiting):
            if not self.slots:
                return
            if lock := self._lock(point):
                with lock:
                    self.waiting.remove(point)
                    if self._is_due(point):  # the process that held it may have finished it
                        self._launch(point, lock)
        if self.waiting and not self.running:
            if not self.held_up:
                self._say(f'{self.waiting[0].name}: another process runs it; waiting for that')
            self.held_up = True
            time.sleep(1.0)

    def _launch(self, point: Point, lock: BinaryIO) -> None:
        config = self.sweep.prepare(point)
        slot = self.slots.pop(0)
        log = open(self.sweep.notes / f'{point.name}.log', 'ab') if self.sweep.is_local else _temporary()  # noqa: SIM115
        command = ['train', '--run_dir', str(self.sweep.root / point.name), '--gin_file', config]
        environment = dict(os.environ)
        if self.gpus_per_job:
            environment['CUDA_VISIBLE_DEVICES'] = ','.join(self._gpus(slot))
        process = subprocess.Popen(
            [sys.executable, '-m', 'lm.sweep.child', str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            # Ctrl-C reaches the sweep alone, which tells its points to save; if the sweep is killed, the system does.
            start_new_session=True,
            # The lock is held for as long as the point runs, even by one that outlives this process for a moment.
            pass_fds=(lock.fileno(),) if lock.fileno() >= 0 else (),
        )
        self.running.append(Job(point, process, log, slot))
        self._say(f'{point.name}: started' + (f', see {log.name}' if self.sweep.is_local else ''))

    def _end(self, job: Job) -> None:
        self.running.remove(job)
        self.slots = sorted([*self.slots, job.slot])
        code, last = job.process.returncode, _last_line(job.log)
        job.log.close()
        if code == 0:
            row = self.sweep.result(job.point)
            measured = [f', {m} {row[m]:.3f}' for m in ('perplexity', 'accuracy') if row[m] is not None]
            self._say(f'{job.point.name}: done{"".join(measured)}')
        elif code in INTERRUPTED or self.signals:
            # Of points that nobody stopped: this machine is being taken away, or someone stops one after the other.
            self._say(f'{job.point.name}: interrupted ({code})')
            if not self.signals:
                self._stop()
        else:
            error = f'killed by {signal.Signals(-code).name}; {last}' if code < 0 else last
            self.sweep.record_failure(job.point, code, error)
            self._say(f'{job.point.name}: failed ({code}): {error}')
        self.sweep.write_results()

    def _stop(self, *_: Any) -> None:
        """Tells the points to save and end; at a second call, kills them."""
        self.signals += 1
        for job in self.running:
            with contextlib.suppress(ProcessLookupError):
                job.process.send_signal(signal.SIGTERM if self.signals == 1 else signal.SIGKILL)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: Any) -> None:
        self._stop()

    def _lock(self, point: Point) -> BinaryIO | None:
        """A file that is locked until it and its copy in the point's process are closed; None: somebody has it."""
        if not self.sweep.is_local:
            return _temporary()
        import fcntl

        self.sweep.notes.mkdir(parents=True, exist_ok=True)
        file = open(self.sweep.notes / f'.{point.name}.lock', 'wb')  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            return None
        return file

    def _gpus(self, slot: int) -> list[str]:
        listed = os.environ.get('CUDA_VISIBLE_DEVICES')
        first, after = slot * self.gpus_per_job, (slot + 1) * self.gpus_per_job
        visible = listed.split(',') if listed else [str(i) for i in range(after)]
        if len(visible) < after:
            raise ConfigError(f'--gpus_per_job {self.gpus_per_job}: CUDA_VISIBLE_DEVICES has only {len(visible)} GPUs')
        return visible[first:after]

    def _report(self) -> None:
        """A line for each running point once in a while."""
        if time.monotonic() - self._last_report < REPORT_SECONDS:
            return
        self._last_report = time.monotonic()
        for job in self.running:
            row = self.sweep.result(job.point)
            self._say(f'{row["point"]}: step {row["step"]:,} of {row["steps"]:,}')

    def _say(self, text: str) -> None:
        left = len(self.waiting)
        print(f'{time.strftime("%H:%M:%S")}  {text}  ({left} waiting)', flush=True)


def results_table(rows: list[dict[str, Any]]) -> Any:
    """The table of results for people."""
    from rich.table import Table

    table = Table()
    measures = [m for m in ('perplexity', 'accuracy') if any(row[m] is not None for row in rows)] or ['perplexity']
    for heading in ('point', 'status', 'steps', *(f'validation {m}' for m in measures), 'tokens/s', 'error'):
        left = heading in ('point', 'status', 'error')
        table.add_column(heading, justify='left' if left else 'right', overflow='fold')
    for row in rows:
        rate = row['tokens_per_second']
        table.add_row(
            row['point'],
            row['status'] + (f' ({row["exit_code"]})' if row['status'] == 'failed' else ''),
            f'{row["step"]:,}/{row["steps"]:,}',
            *('–' if row[m] is None else f'{row[m]:.3f}' for m in measures),
            '–' if rate is None else si(rate),
            row['error'] or '',
        )
    return table


def _temporary() -> Any:
    import tempfile

    return tempfile.TemporaryFile()


def _last_line(log: BinaryIO) -> str:
    """The error with which `lm train` ended, else its last line."""
    log.flush()
    if isinstance(log.name, int):
        log.seek(0)
        content = log.read()
    else:
        content = pathlib.Path(log.name).read_bytes()
    lines = [line.strip() for line in content[-20_000:].decode(errors='replace').replace('\r', '\n').splitlines()]
    lines = [line for line in lines if line] or ['it printed nothing']
    errors = [line for line in lines if line.startswith('lm train: error: ')]
    return (errors or lines)[-1].removeprefix('lm train: error: ')[:500]
