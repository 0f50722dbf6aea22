"""The points of a sweep and their folder."""

import contextlib
import json
import logging
import os
import socket
from collections.abc import Iterator, Mapping

from etils import epath

from lm.errors import FINAL, ConfigError, Diverged, writing
from lm.files import is_remote, open_path, reaching, write_atomically
from lm.folders import SWEEP, check_unshared
from lm.lease import is_held
from lm.runs import sweep_file
from lm.runs.records import Run, is_run
from lm.runs.run_dir import RunDir
from lm.sweep.points import Point

log = logging.getLogger(__name__)

MACHINE_NAMES = ('NODE_NAME', 'SLURMD_NODENAME')
"""Variables in which the manifests for Kubernetes, and Slurm, say what the scheduler calls this machine."""


class Sweep:
    """The points, and their states in the folder `root`, a local path or an address."""

    draws_points = False
    """The points are the trials of a search, which come one by one."""

    def __init__(self, root: epath.PathLike, points: list[Point]):
        self.root = epath.Path(open_path(root, '--run_dir'))
        self.is_local = not is_remote(self.root)
        if self.is_local:
            self.root = self.root.absolute()
        self.points = points
        self.facts: dict[str, object] | None = None
        """Entries of sweep.json besides the points; None: they stay as they are."""
        self.notes = self.root / sweep_file.NOTES

    def check(self) -> None:
        """Raises MismatchError if a directory holds a run with another configuration than the point of its name.

        Raises ConfigError if the folder of the sweep is a run, or holds a search to which the points do not belong.
        """
        if is_run(self.root):
            raise ConfigError(f'--run_dir {self.root}: is a run, which would hide the points; name another folder')
        check_unshared(self.root, f'--run_dir {self.root}', SWEEP)
        if not self.draws_points and sweep_file.read_search(self.root):
            trials = {row['point'] for row in sweep_file.read_rows(self.root)}
            if other := [point.name for point in self.points if point.name not in trials]:
                raise ConfigError(
                    f'--run_dir {self.root}: holds a search, whose table {other[0]} would replace; name another folder'
                )
        for point in self.points:
            RunDir(self.root / point.name).check_unchanged(point.config)

    def is_finished(self, point: Point) -> bool:
        path, failure = self.root / point.name, sweep_file.read_failure(self.root, point.name)
        return is_run(path) and _has_finished(Run.read(path), point, failure)

    def is_due(self, point: Point, retry_failed: bool) -> bool:
        """Tells whether a point is to be trained, and prints why one is left out that is not done."""
        if point.fault:
            print(f'{point.name} makes no configuration and is left out: {point.fault}')
            return False
        row = self.result(point)
        if row['status'] == 'failed' and row['exit_code'] in FINAL and not retry_failed:
            print(f'{point.name} failed with {row["exit_code"]} before and is left out (see --retry_failed)')
            return False
        return row['status'] != 'done'

    def is_running(self, point: Point) -> bool:
        """Tells whether a process trains the point: one of this host, or one that lately renewed its lock elsewhere."""
        return is_held(self.root / point.name)

    def result(self, point: Point) -> sweep_file.Row:
        """Returns the row of a point: status done, failed, pruned, interrupted or waiting, and its measurements."""
        path, failure = self.root / point.name, sweep_file.read_failure(self.root, point.name)
        row: sweep_file.Row = {
            'index': point.index,
            'point': point.name,
            'settings': point.settings,
            'run_dir': str(path),
        }
        status = 'waiting' if not failure else 'pruned' if sweep_file.is_pruned(failure) else 'failed'
        row |= {'status': status, 'step': 0, 'steps': point.experiment.train.steps}
        row |= dict.fromkeys(('split', *sweep_file.MEASURES, 'tokens_per_second'))
        row |= {'exit_code': failure.get('exit_code'), 'error': failure.get('error')}
        if is_run(path):
            run = Run.read(path)
            if _has_finished(run, point, failure):
                row |= {'status': 'done', 'exit_code': 0, 'error': None}
            elif not failure:
                row['status'] = 'interrupted'
            evaluation = run.last_evaluation or {}
            row |= {k: evaluation[k] for k in row.keys() & evaluation.keys() - {'step', 'steps'}}
            row |= {'step': run.step, 'tokens_per_second': run.tokens_per_second}
        return row

    def write_results(self) -> list[sweep_file.Row]:
        """Writes sweep.json from the contents of the directories, and returns its rows.

        Several processes, one per point, may write it. A point could end in one process while this process reads, and
        its row would be lost. So the directories are read again until no point has ended meanwhile: the last writer has
        seen all ends. A file that cannot be written is only a warning: it repeats the directories, and points go on.
        """
        rows = [self.result(point) for point in self.points]
        while True:
            with _note_failure(self.root / sweep_file.NAME):
                sweep_file.write_rows(self.root, rows, self.facts)
            written, rows = rows, [self.result(point) for point in self.points]
            if [row['status'] for row in rows] == [row['status'] for row in written]:
                return written

    def write_config(self, point: Point) -> str:
        """Writes the configuration of a point, and returns the path of the file.

        A point whose values make no configuration has no file. Raises LmError if the file cannot be written.
        """
        path = self.notes / f'{point.name}.gin'
        with writing(path), reaching(path):
            self.notes.mkdir(parents=True, exist_ok=True)
            if point.fault:
                path.unlink(missing_ok=True)  # earlier versions wrote another configuration
            else:
                write_atomically(path, point.config)
        return str(path)

    def prepare(self, point: Point) -> str:
        """Does the same as `write_config`, and forgets the last failure of the point."""
        written, note = self.write_config(point), self.notes / f'{point.name}.json'
        with writing(note), reaching(note):
            note.unlink(missing_ok=True)
        return written

    def record_failure(self, point: Point, exit_code: int, error: str) -> None:
        """Records how a point failed. If that fails, there is a warning, and the point is tried again later."""
        self._note(point, {'exit_code': exit_code, 'error': error})

    def record_pruned(self, point: Point, step: int) -> None:
        """Records that a search has ended the point early. A failure is only a warning: the search finds it again."""
        self._note(point, {'exit_code': None, 'error': f'pruned at step {step:,}', 'pruned_at': step})

    def _note(self, point: Point, content: dict[str, object]) -> None:
        path = self.notes / f'{point.name}.json'
        with _note_failure(path):
            write_atomically(path, json.dumps(content) + '\n')

    def record_wrong_machine(self, point: Point, error: str) -> None:
        """Records that this machine computed wrongly: in the folder, and in the file that $LM_WRONG_MACHINES names.

        A scheduler keeps clear of the machines in that file. A failure is only a warning.
        """
        machine = next((os.environ[name] for name in MACHINE_NAMES if os.environ.get(name)), socket.gethostname())
        with _note_failure(self.notes / sweep_file.MACHINES):
            sweep_file.record_wrong_machine(self.root, machine, point.name, error)
        if path := os.environ.get('LM_WRONG_MACHINES'):
            with _note_failure(epath.Path(path)), open(path, 'a') as file:
                file.write(f'{machine}\n')


@contextlib.contextmanager
def _note_failure(path: epath.Path) -> Iterator[None]:
    """Turns a failure to write `path` in its block into a warning: a full disk must not change a point's end."""
    try:
        with reaching(path):
            yield
    except OSError as error:
        log.warning('%s could not be written: %s', path, error)


def _has_finished(run: Run, point: Point, failure: Mapping[str, object]) -> bool:
    """Tells whether the run has done the steps of the point, whose number may have grown since (`lm train` then goes
    on).

    A run that diverged in its last steps has done all of them, too: its `failure` counts.
    """
    if failure.get('exit_code') == Diverged.exit_code:
        return False
    return run.is_finished() and run.total_steps >= point.experiment.train.steps
