"""Run directories with damage of any kind: what reads them ends with one line, soon, and without a traceback."""

import pathlib
import shutil

import pytest
from damage import LENGTHS, check_damages

from lm.errors import MismatchError
from lm.inference.loaded_run import open_run
from lm.report.report import Report
from lm.runs.records import Run
from lm.summary.inspect import inspect_path


def read_run(path: pathlib.Path) -> None:
    """Reads a run as `lm inspect --verify`, `lm report`, `lm evaluate` and `lm export` read it."""
    Report([Run.read(path)], path / 'report').make_tables()
    open_run(str(path))
    inspect_path(str(path), verify=True)


@pytest.mark.parametrize('seconds', LENGTHS)
def test_damaged_runs_are_told_in_one_line(reference_run, seconds, tmp_path, capsys):
    whole = tmp_path / 'whole' / 'run'
    shutil.copytree(reference_run[0], whole, ignore=shutil.ignore_patterns('compiled', 'evaluations'))
    for old in sorted((whole / 'checkpoints').iterdir())[:-1]:
        shutil.rmtree(old)
    read_run(whole)
    with capsys.disabled():
        # Four commands read each damaged run: a third of a second.
        check_damages(whole, read_run, tmp_path, seconds, examples=30)
    (whole / 'metrics.jsonl').write_text('')
    with pytest.raises(MismatchError, match='are gone'):
        read_run(whole)
