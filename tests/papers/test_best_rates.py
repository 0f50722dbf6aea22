"""The best rate of a sweep is the lowest point of a parabola; beyond the rates of the sweep there is no figure."""

import json
import math
import runpy
import subprocess
import sys

import made_up_runs
import pytest
import tiny

from lm.attention.softmax import Softmax
from lm.runs.records import to_json

SCRIPT = tiny.ROOT / 'configs/papers/study/width/best_rates.py'


def write_sweep(folder, best: dict[int, float], rates: list[float]) -> None:
    """Writes runs whose last losses lie on a parabola in the logarithm of the rate, with its lowest point of 4 at
    `best`."""
    points = []
    for width, lowest in best.items():
        for rate in rates:
            run = made_up_runs.write_run(folder / f'{width}-{rate}', Softmax(), steps=50, log_every=10)
            loss = 4 + 0.5 * math.log2(rate / lowest) ** 2
            lines = [json.loads(line) for line in (run / 'metrics.jsonl').read_text().splitlines()]
            lines = [line | {'loss': loss if line['step'] > 40 else 9.0} for line in lines]
            (run / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
            settings = {'model.d_model': str(width), 'optimizer.peak_learning_rate': repr(rate)}
            points.append({'point': run.name, 'status': 'done', 'settings': settings, 'run_dir': str(run)})
    waiting = points[0] | {'status': 'waiting', 'settings': points[0]['settings'] | {'model.d_model': '999'}}
    fields = {'index': 0, 'step': 50, 'steps': 50}
    (folder / 'sweep.json').write_text(to_json({'kind': 'sweep', 'points': [fields | p for p in [*points, waiting]]}))


def run(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        capture_output=True,
        text=True,
    )


def test_the_best_rate_is_found_between_the_rates_of_the_sweep(tmp_path):
    write_sweep(tmp_path, {64: 0.012, 128: 0.1}, [0.004, 0.008, 0.016, 0.032])
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.strip('|').split('|')] for line in done.stdout.splitlines()[2:]]
    assert [row[:3] for row in rows] == [['d_model 64', '0.012', '4.000'], ['d_model 128', 'not between', '']]
    assert rows[0][3].startswith('0.004: 5.256, 0.008: 4.171, 0.016: 4.086')


@pytest.mark.parametrize(('arguments', 'said'), [([], 'best learning rate'), (['nowhere'], 'nowhere/sweep.json')])
def test_a_missing_argument_is_reported(arguments, said):
    done = run(*arguments)
    assert done.returncode == 1
    assert said in done.stderr


def test_a_copied_sweep_shows_its_own_runs(tmp_path):
    write_sweep(tmp_path / 'a', {64: 0.012}, [0.004, 0.008, 0.016, 0.032])
    (tmp_path / 'a').rename(tmp_path / 'b')
    done = run(tmp_path / 'b')
    assert done.returncode == 0, done.stderr
    assert '| 4.000 |' in done.stdout


def test_a_sweep_without_rates_is_one_error_line(tmp_path):
    point = {'index': 0, 'point': 'seed-0', 'status': 'done', 'settings': {'train.seed': '0'}, 'step': 5, 'steps': 5}
    (tmp_path / 'sweep.json').write_text(to_json({'kind': 'sweep', 'points': [point]}))
    done = run(tmp_path)
    assert done.returncode == 1
    assert 'seed-0 has no optimizer.peak_learning_rate; name a sweep over rates' in done.stderr
    assert done.stderr.count('\n') == 1


def test_a_rate_without_a_finite_loss_is_not_the_best_and_bounds_nothing(tmp_path):
    """A run at a high rate may skip a step, whose loss is NaN, and still finish."""
    rates = [0.004, 0.008, 0.016, 0.032]
    write_sweep(tmp_path, {64: 0.012, 128: 0.012, 256: 0.012}, rates)
    for name in ('64-0.004', '64-0.032', '128-0.016', *(f'256-{rate}' for rate in rates)):
        path = tmp_path / name / 'metrics.jsonl'
        *rest, last = [json.loads(line) for line in path.read_text().splitlines() if '"kind": "train"' in line]
        path.write_text(''.join(json.dumps(line) + '\n' for line in [*rest, last | {'loss': 'NaN'}]))
    table = runpy.run_path(str(SCRIPT))['table'](tmp_path)
    rows = [[cell.strip() for cell in line.strip('|').split('|')] for line in table.splitlines()[2:]]
    assert [row[1:3] for row in rows] == [['not between', ''], ['0.012', '4.000'], ['not between', '']]
    assert '0.032: nan' in rows[0][3]
