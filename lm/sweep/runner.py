"""Runs the points of a sweep as processes of `lm train`, a few at a time."""

import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import BinaryIO

from lm.errors import ConfigError, LmError, Preempted
from lm.lease import HeldError, Lease
from lm.runs import sweep_file
from lm.runs.lock import OccupiedError
from lm.secrets import list_variables
from lm.signals import ENDING, INTERRUPTED, handle_signals
from lm.sweep.options import SweepOptions
from lm.sweep.points import Point
from lm.sweep.sweep import Sweep
from lm.text import format_count

POLL_SECONDS = 0.2
REPORT_SECONDS = 60.0
FIRST_STEP = 'first step after '
"""How the line begins that a training prints behind its first step."""


@dataclasses.dataclass
class RunningPoint:
    """A running point."""

    point: Point
    process: subprocess.Popen
    log: BinaryIO
    slot: int
    begin: int
    """The bytes that earlier attempts have left in the log."""
    held: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    """It gives back the lease of the point."""

    def read_log(self) -> str:
        """Returns the last 20 kB of this attempt. The position, at which the point may write, stays where it is."""
        self.log.flush()
        if isinstance(self.log.name, int):
            content = os.pread(self.log.fileno(), os.fstat(self.log.fileno()).st_size, 0)
        else:
            content = pathlib.Path(self.log.name).read_bytes()
        return content[self.begin :][-20_000:].decode(errors='replace')


class Runner:
    """Runs the points of a sweep as processes, `jobs` at a time."""

    def __init__(self, sweep: Sweep, options: SweepOptions):
        self.sweep, self.options = sweep, options
        self.slots = list(range(options.jobs))
        if options.gpus_per_job:
            _gpus(options.gpus_per_job, max(self.slots))  # refuses GPUs that do not exist
        self.waiting = [p for p in sweep.points if self.is_due(p)]
        self.running: list[RunningPoint] = []
        self.signals = 0
        self.held_up = False
        self._last_report = time.monotonic()

    def run(self) -> None:
        """Runs the points that are due, until all points of the sweep are done.

        Raises:
            Preempted: the sweep, or one of its points, was asked to stop.
            LmError: not all points succeeded.
        """
        self.sweep.write_results()
        with handle_signals(self._take_signals), self._leases():
            while self.running or (self.has_more() and not self.signals):
                self.look()
                if not self.signals:
                    self._start()
                for job in [job for job in self.running if job.process.poll() is not None]:
                    self.end(job)
                self._report()
                time.sleep(POLL_SECONDS)
        rows = self.sweep.write_results()
        sweep_file.print_results(rows)
        self.conclude(rows)

    @contextlib.contextmanager
    def _leases(self) -> Iterator[None]:
        """A block whose end gives back the leases of points that still run, whose trainings hold leases, too."""
        try:
            yield
        finally:
            for job in self.running:
                job.held.close()

    def has_more(self) -> bool:
        """Tells whether points are still to come."""
        return bool(self.waiting)

    def look(self) -> None:
        """Looks at the folder, between two looks at the processes."""

    def conclude(self, rows: list[sweep_file.Row]) -> None:
        """Raises the errors of `run` at its end."""
        unfinished = [row for row in rows if row['status'] != 'done']
        if self.signals:
            raise Preempted(
                f'stopped with {len(unfinished)} of {format_count(len(rows), "point")} unfinished, what they did is '
                'saved: run the same command again'
            )
        if unfinished:
            raise LmError(
                f'{len(unfinished)} of {format_count(len(rows), "point")} did not succeed: '
                f'{", ".join(row["point"] for row in unfinished[:4])}{" …" if unfinished[4:] else ""}; '
                f'see {self.sweep.notes}'
            )

    def is_due(self, point: Point) -> bool:
        return self.sweep.is_due(point, self.options.retry_failed)

    def _start(self) -> None:
        """Starts points while there are slots. Points that another process runs wait."""
        for point in list(self.waiting):
            if not self.slots or self.signals:
                return
            if not self.sweep.is_running(point) and (held := self._take(point)):
                with held:
                    self.waiting.remove(point)
                    if self.is_due(point):  # its other process may have finished it
                        self.launch(point, held)
        if self.waiting and not self.running:
            if not self.held_up:
                self.say(f'{self.waiting[0].name}: another process runs it; waiting for that')
            self.held_up = True
            time.sleep(1.0)

    def launch(self, point: Point, held: contextlib.ExitStack) -> None:
        config = self.sweep.prepare(point)
        slot = self.slots.pop(0)
        kept = self.sweep.notes / f'{point.name}.log'
        log = open(kept, 'ab') if self.sweep.is_local else tempfile.TemporaryFile()  # noqa: SIM115 (closed by _end)
        begin = os.fstat(log.fileno()).st_size
        command = ['train', '--run_dir', str(self.sweep.root / point.name), '--gin_file', config]
        command += ['--allow_gin_imports'] if self.options.allow_gin_imports else []
        environment = os.environ | list_variables()
        if self.options.gpus_per_job:
            environment['CUDA_VISIBLE_DEVICES'] = ','.join(_gpus(self.options.gpus_per_job, slot))
        process = subprocess.Popen(
            [sys.executable, '-m', 'lm.sweep.child', str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            # Ctrl-C reaches the sweep alone, which asks its points to save; of a killed sweep, the system does.
            start_new_session=True,
        )
        self.running.append(RunningPoint(point, process, log, slot, begin, held.pop_all()))
        if self.signals:  # they arrived before it was listed
            process.send_signal(signal.SIGTERM)
        self.say(f'{point.name}: started' + (f', see {log.name}' if self.sweep.is_local else ''))

    def free(self, job: RunningPoint) -> str:
        """Gives the slot of a point that has ended to others, and returns the last line of its log."""
        self.running.remove(job)
        self.slots = sorted([*self.slots, job.slot])
        last = _find_last_line(job.read_log())
        job.log.close()
        job.held.close()
        return last

    def end_early(self, job: RunningPoint) -> None:
        """Asks one point to save and end."""
        with contextlib.suppress(ProcessLookupError):
            job.process.send_signal(signal.SIGTERM)

    def end(self, job: RunningPoint) -> None:
        code, last = job.process.returncode, self.free(job)
        if code == 0:
            row = self.sweep.result(job.point)
            measured = [f', {m} {row[m]:.3f}' for m in ('perplexity', 'accuracy') if row[m] is not None]
            self.say(f'{job.point.name}: done{"".join(measured)}')
        elif code in INTERRUPTED or self.signals:
            # The sweep did not stop it: the machine is being taken away, or someone stops the points one by one.
            self.say(f'{job.point.name}: interrupted ({code})')
            if not self.signals:
                self.stop()
        elif code == OccupiedError.exit_code and self.sweep.is_running(job.point):
            self.say(f'{job.point.name}: another process runs it; left to that')
            self.waiting.append(job.point)
        else:
            error = f'killed by {signal.Signals(-code).name}; {last}' if code < 0 else last
            self.sweep.record_failure(job.point, code, error)
            self.say(f'{job.point.name}: failed ({code}): {error}')
        self.sweep.write_results()

    def stop(self, *_: object) -> None:
        """Asks the points to save and end; the second call kills them."""
        self.signals += 1
        for job in self.running:
            with contextlib.suppress(ProcessLookupError):
                job.process.send_signal(signal.SIGTERM if self.signals == 1 else signal.SIGKILL)

    def _take_signals(self) -> None:
        for number in ENDING:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores it
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        if number != signal.SIGHUP or not self.signals:  # the system and a shell both report a closed terminal
            self.stop()

    def _take(self, point: Point) -> contextlib.ExitStack | None:
        """Returns what gives back the lease of a point; None: another process has it. A bucket has no such leases."""
        held = contextlib.ExitStack()
        try:
            if self.sweep.is_local:
                held.enter_context(Lease(self.sweep.notes, f'.{point.name}.lock'))
        except HeldError:
            return None
        return held

    def _report(self) -> None:
        """Prints a line for each running point from time to time."""
        if time.monotonic() - self._last_report < REPORT_SECONDS:
            return
        self._last_report = time.monotonic()
        for job in self.running:
            row = self.sweep.result(job.point)
            self.say(f'{row["point"]}: {_describe_progress(row["step"], row["steps"], job)}')

    def say(self, text: str) -> None:
        left = len(self.waiting)
        print(f'{time.strftime("%H:%M:%S")}  {text}  ({left} waiting)', flush=True)


def _describe_progress(step: int, steps: int, job: RunningPoint) -> str:
    """Describes how far a running point is, by its last logged step or else by its log."""
    if step:
        return f'step {step:,} of {steps:,}'
    return 'training, no step is logged yet' if FIRST_STEP in job.read_log() else 'starting or compiling, no step yet'


def _gpus(count: int, slot: int) -> list[str]:
    """Returns the `count` GPUs of a slot. Raises ConfigError if there are not so many."""
    listed = os.environ.get('CUDA_VISIBLE_DEVICES')
    first, after = slot * count, (slot + 1) * count
    visible = listed.split(',') if listed else [str(i) for i in range(after)]
    if len(visible) < after:
        raise ConfigError(f'--gpus_per_job {count}: CUDA_VISIBLE_DEVICES has only {len(visible)} GPUs')
    return visible[first:after]


def _find_last_line(log: str) -> str:
    """Returns the error with which `lm train` ended, or else its last line."""
    lines = [line.strip() for line in log.replace('\r', '\n').splitlines()]
    lines = [line for line in lines if line] or ['it printed nothing']
    errors = [line for line in lines if line.startswith('lm train: error: ')]
    return (errors or lines)[-1].removeprefix('lm train: error: ')[:500]
