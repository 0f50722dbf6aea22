"""The comparison of functions of generalized attention counts the steps that were not finite."""

import json
import runpy
import sys

import made_up_runs
import pytest
import tiny

from lm.attention.performer import Performer
from lm.runs.records import to_json

MAIN = runpy.run_path(str(tiny.ROOT / 'configs/papers/performer/figure_12/kernels.py'))['main']


def write_sweep(folder) -> None:
    """Writes a sweep with a good run, one that diverged after skipped steps, and one that never began."""
    points = []
    for name, divided, quality, status in (
        ('relu', True, 0.0, 'done'),
        ('exp', False, 0.5, 'failed'),
        ('tanh', True, 0.0, 'waiting'),
    ):
        attention = Performer(features=name, renormalize=divided)
        settings = {'performer.features': repr(name), 'performer.renormalize': repr(divided)}
        point = {'point': f'features-{name}', 'status': status, 'settings': settings, 'step': 500, 'steps': 500}
        points.append(point | {'exit_code': 43 if status == 'failed' else None})
        if status != 'waiting':
            options = {'steps': 500, 'accuracy': True, 'quality': quality}
            run = made_up_runs.write_run(folder / f'features-{name}', attention, **options)
            lines = [json.loads(line) for line in (run / 'metrics.jsonl').read_text().splitlines()]
            for line in lines:
                if status == 'failed' and line['kind'] == 'train' and line['step'] > 400:
                    line |= {'skipped_steps': line['step'] - 400, 'loss': 'NaN'}
            (run / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    (folder / 'sweep.json').write_text(to_json({'kind': 'sweep', 'points': points}))


@pytest.fixture
def compare(tmp_path, monkeypatch, capsys):
    """Returns a function that runs the command in a folder and returns (exit code, stdout, stderr)."""

    def call(folder) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, 'argv', ['kernels.py', str(folder), '--out', str(tmp_path / 'picture')])
        code = MAIN()
        return code, *capsys.readouterr()

    return call


def test_runs_that_ended_early_are_drawn_and_their_nans_counted(compare, tmp_path):
    write_sweep(tmp_path / 'sweep')
    code, out, _ = compare(tmp_path / 'sweep')
    assert code == 0
    rows = [[cell.strip() for cell in line.strip('|').split('|')] for line in out.splitlines()[2:5]]
    assert [row[0] for row in rows] == ['relu', 'exp, sums', 'tanh']
    assert [row[3:] for row in rows] == [['0', 'done'], ['100', 'diverged (43)'], ['0', 'waiting']]
    assert float(rows[0][1]) > float(rows[1][1])
    assert rows[2][1] == 'nan'
    assert (tmp_path / 'picture.png').exists()


def test_a_sweep_that_did_not_begin_is_one_error_line(compare, tmp_path):
    (tmp_path / 'sweep.json').write_text(to_json({'kind': 'sweep', 'points': []}))
    code, _, error = compare(tmp_path)
    assert code != 0
    assert 'run the sweep first' in error
    assert error.count('\n') == 1
