"""`lm sweep --status`: how far the points are, read from their run directories, wherever these lie."""

import collections
from collections.abc import Mapping

from etils import epath

from lm.errors import ConfigError
from lm.files import open_path
from lm.lease import is_held, read_silence
from lm.runs import sweep_file
from lm.runs.records import Run, find_run_paths, is_run
from lm.text import format_count, format_duration, make_visible, print_table

COLUMNS = ('point', 'status', 'steps', 'heartbeat', 'loss', 'reason')


def show_status(root: epath.PathLike) -> None:
    """Prints the states of all points below `root`, and their counts. Raises ConfigError if there are none."""
    found = read_status(root)
    rows = [
        (
            *(row['point'], row['status'], f'{row["step"]:,}/{row["steps"]:,}'),
            '–' if row['silence'] is None else f'{format_duration(row["silence"])} ago',
            '–' if row['loss'] is None else f'{row["loss"]:.4f}',
            row['error'],
        )
        for row in found
    ]
    print_table(COLUMNS, rows, left=('point', 'status', 'reason'))
    counts = collections.Counter(row['status'] for row in found)
    parts = ', '.join(f'{count} {status}' for status, count in sorted(counts.items()))
    print(f'{format_count(len(found), "point")} in {root}: {parts}')


def read_status(root: epath.PathLike) -> list[sweep_file.Row]:
    """Returns a row per point, of those in sweep.json or else of the run directories in the folder.

    A row has `point`, `status`, `step`, `steps`, `silence` (seconds since the lock was last renewed; None: there is no
    lock), `loss` of the newest logged step, and `error`: why it does not run.
    """
    path = epath.Path(open_path(root, '--run_dir'))
    if sweep_file.is_sweep(path):
        return [_read_point(path, row['point'], row['steps']) for row in sweep_file.read_rows(path)]
    if not (runs := find_run_paths(str(path))):
        raise ConfigError(f'--run_dir {root}: holds neither a sweep nor runs; name the folder of an lm sweep')
    return [_read_point(run.parent, run.name, 0) for run in runs]


def _read_point(root: epath.Path, name: str, steps: int) -> sweep_file.Row:
    path, failure = root / name, sweep_file.read_failure(root, name)
    run = Run.read(path) if is_run(path) else None
    silence = read_silence(path)
    status, reason = _judge(run, failure, is_held(path), silence)
    return {
        'point': make_visible(name),
        'status': status,
        'step': run.step if run else 0,
        'steps': run.total_steps if run else steps,
        'silence': silence,
        'loss': run.train[-1]['loss'] if run and run.train else None,
        'error': make_visible(reason),
    }


def _judge(run: Run | None, failure: Mapping[str, object], alive: bool, silence: float | None) -> tuple[str, str]:
    """Returns the status and the reason of it."""
    if run and run.is_finished():
        return 'done', ''
    if alive:
        return 'running', ''
    if sweep_file.is_pruned(failure):
        return 'pruned', str(failure.get('error') or '')
    if failure:
        code = failure.get('exit_code')
        return sweep_file.describe_status('failed', code), str(failure.get('error') or '')
    if silence is not None:
        return 'interrupted', f'it vanished {format_duration(silence)} ago, without giving its lock back'
    return ('interrupted', 'it ended in order, and saved') if run else ('waiting', '')
