"""`lm reproduce` on this machine: prepares the data, trains the runs, runs what follows, and writes the table.

Each part leaves out what is done, so the same command goes on wherever it was stopped.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from etils import epath

from lm import plots
from lm.config.project import project_root
from lm.data.prepare.run import run as run_preparation
from lm.data.prepare.stages import prepare
from lm.errors import ConfigError, LmError, Preempted
from lm.files import is_remote
from lm.report.published import Figure
from lm.reproduce.descriptions import FOLDER, Description
from lm.reproduce.program import run_program
from lm.reproduce.runs import TableChoice, TableRun, list_runs
from lm.reproduce.table import ReproducedTable, collect, read_figure
from lm.runs.records import Run
from lm.sweep.options import SweepOptions
from lm.sweep.run import run_sweep
from lm.sweep.sweep import Sweep
from lm.text import format_count

OUT = 'table'
"""The folder of the table, in the folder of the runs."""


def reproduce(
    description: Description, choice: TableChoice, root: str, options: SweepOptions, pictures: bool = True
) -> None:
    """Repeats a table on this machine.

    Raises:
        ConfigError: the table has no such scale, row or column.
        Preempted: it was asked to stop; the same command goes on.
        LmError: a run did not succeed; the table has the others.
    """
    if pictures:
        plots.check_matplotlib(', or pass --no_pictures')
    if is_remote(root):
        raise ConfigError(f'--run_dir {root}: the table is written beside the runs; name a local folder, or give --on')
    runs = list_runs(description, choice, root)
    starts = [run.point for run in runs if run.is_start]
    sweep = Sweep(root, [run.point for run in runs])
    sweep.check()
    prepare_data(runs, sweep)
    failure = None
    if runs:
        try:
            if starts:
                run_sweep(Sweep(root, starts), options)
            run_sweep(sweep, options)
        except Preempted:
            raise
        except LmError as error:
            failure = error
    score_tasks(runs, sweep)
    for line in description.commands.get(choice.scale, ()):
        run_command(line, root)
    if runs:
        table, folder = ReproducedTable(description, choice, runs, collect(runs, sweep)), Path(root) / OUT
        names = table.write(folder, pictures)
        table.print()
        for line in (*table.list_remarks(), f'{format_count(len(names), "file")} in {folder}: {", ".join(names)}'):
            print(line)
    if failure:
        raise failure


def prepare_data(runs: Sequence[TableRun], sweep: Sweep) -> None:
    """Prepares the stores of the runs that are not finished, each once."""
    due = [run.point.experiment for run in runs if not sweep.is_finished(run.point)]
    stores = {e.data.path: e.prepare for e in due if not e.data.task and not e.data.mixture and e.prepare.source}
    for path, config in stores.items():
        if not (epath.Path(path) / 'dataset.json').exists():
            print(f'preparing {path}', flush=True)
            run_preparation(prepare, config, path)


def score_tasks(runs: Sequence[TableRun], sweep: Sweep) -> None:
    """Scores finished runs on the tasks of the harness that the paper asks, where they have no score yet."""
    for run in runs:
        if sweep.is_finished(run.point):
            path = str(sweep.root / run.point.name)
            record = Run.read(path)
            for figure in (cell.figure for cell in run.cells if cell.figure.task):
                if read_figure(run, record, figure) is None:
                    run_command(describe_scoring(path, figure), str(sweep.root))


def describe_scoring(path: str, figure: Figure) -> str:
    """Returns the command that scores the run in `path`."""
    words = ['lm', 'evaluate', '--run_dir', path, '--tasks', figure.task or '', '--num_fewshot', str(figure.shots or 0)]
    words += ['--limit', str(figure.examples), '--sample_seed', '0'] if figure.examples else []
    return shlex.join(words)


def run_command(line: str, root: str) -> None:
    """Runs a command of a description. Raises LmError where it fails, and Preempted where a signal stops it."""
    words = [word.replace('{root}', root) for word in shlex.split(line)]
    own = {'lm': [sys.executable, '-m', 'lm'], 'python': [sys.executable]}
    words = own.get(words[0], words[:1]) + words[1:]
    files = [str(project_root() / word) if word.startswith(f'{FOLDER.as_posix()}/') else word for word in words]
    print(f'$ {shlex.join(words)}', flush=True)
    if code := run_program(files):
        raise LmError(f'{shlex.join(words)}: ended with {code}; run the same command again when mended')
