"""`lm report --ladder`: the curve of a baseline, the effective speed-up of other runs, and what is refused."""

import csv
import json
import math
import pathlib
import re

import numpy as np
import pytest
import tiny
from made_up_runs import evaluate, write_run

from lm.attention.polysketch import Polysketch
from lm.attention.softmax import Softmax
from lm.cli import main
from lm.errors import ConfigError
from lm.report.ladder import format_power, make_ladder, measure_result
from lm.report.measures import Measures
from lm.report.pictures import Pictures
from lm.report.power_law import PowerLaw, fit_power_law
from lm.runs.records import Run, find_runs

LAW = PowerLaw(limit=1.7, factor=2.1, exponent=0.21, unit=1e17)
SIZES = {2: 100, 4: 200, 6: 300, 8: 400}
"""Layers → steps of the made-up runs."""


def climb(folder: pathlib.Path, attention, speedup: float, sizes=(2, 4, 6, 8), seeds=(0,), **options) -> None:
    """Writes runs whose losses lie on LAW at `speedup` times their compute."""
    for layers in sizes:
        for seed in seeds:
            shape = {'n_layers': layers, 'd_model': 64 * layers}
            run = write_run(
                folder / f'{layers}-{seed}', attention, steps=SIZES[layers], seed=seed, model=shape, **options
            )
            set_loss(run, speedup)


def set_loss(run: pathlib.Path, speedup: float, nats: float = 0.0) -> None:
    """Gives a run the loss of LAW at `speedup` times its compute, and `nats` more."""
    loss = float(LAW.predict(speedup * measure_result(Run.read(run), Measures()).compute)) + nats
    evaluate(run, loss=loss, perplexity=math.exp(loss))


def table(path: pathlib.Path) -> list[dict[str, str]]:
    with open(path, newline='') as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize('n', [3, 5])
@pytest.mark.parametrize(('limit', 'exponent'), [(1.7, 0.21), (0.0, 0.05), (3.2, 1.1)])
def test_the_fit_finds_a_known_law(n, limit, exponent):
    law = PowerLaw(limit, 2.1, exponent, 1e12)
    compute = np.geomspace(3e10, 4e13, n)
    found = fit_power_law(compute, law.predict(compute))
    np.testing.assert_allclose(found.predict(compute), law.predict(compute), rtol=1e-7)
    assert found.exponent == pytest.approx(exponent, rel=1e-4)
    assert found.limit == pytest.approx(limit, abs=1e-4)
    assert found.invert(float(law.predict(7e11))) == pytest.approx(7e11, rel=1e-5)
    assert law.predict(7e11) - law.predict(7e11 * law.convert_to_factor(1e-5, 7e11)) == pytest.approx(1e-5, rel=1e-3)


def test_the_fit_minimizes_the_squared_residuals():
    compute = np.geomspace(1e10, 1e13, 12)
    loss = LAW.predict(compute * 1e5) + 0.02 * np.sin(np.arange(12) * 12.9)
    found = fit_power_law(compute, loss)

    def squares(law: PowerLaw) -> float:
        return float(np.sum((law.predict(compute) - loss) ** 2))

    for name in ('limit', 'factor', 'exponent'):
        for change in (0.999, 1.001):
            other = PowerLaw(**vars(found) | {name: getattr(found, name) * change})
            assert squares(other) > squares(found)


def test_the_limit_is_never_negative():
    """Noise can ask for a limit far below zero, which no loss has."""
    compute = np.array([1e10, 1e11, 1e12])
    found = fit_power_law(compute, np.array([5.0, 4.6, 3.9]))
    assert found.limit == 0
    with pytest.raises(ConfigError, match='do not fall with compute'):
        fit_power_law(compute, np.array([4.0, 4.5, 5.0]))


def test_a_known_curve_gives_back_the_speedup(tmp_path, capsys):
    climb(tmp_path / 'base', Softmax(), 1.0, seeds=(0, 1))
    climb(tmp_path / 'ours', Polysketch(), 1.5, sizes=(4, 6))
    climb(tmp_path / 'worse', Polysketch(sketch_size=8), 0.4, sizes=(6,))
    out = tmp_path / 'out'
    flags = ['--ladder', str(tmp_path / 'base'), '--out', str(out)]
    assert main(['report', str(tmp_path / 'ours'), str(tmp_path / 'worse'), *flags]) == 0
    rows = table(out / 'runs.csv')
    assert len(rows) == 2 + 1 + 8, 'the baseline is in the report too'
    found = {pathlib.Path(row['path']).relative_to(tmp_path).as_posix(): row for row in rows}
    assert float(found['ours/4-0']['effective_speedup']) == pytest.approx(1.5, rel=1e-4)
    assert float(found['ours/6-0']['effective_speedup']) == pytest.approx(1.5, rel=1e-4)
    assert float(found['worse/6-0']['effective_speedup']) == pytest.approx(0.4, rel=1e-4)
    run = Run.read(tmp_path / 'base' / '4-0')
    assert float(found['base/4-0']['effective_speedup']) == pytest.approx(1, rel=1e-4)
    assert float(found['base/4-0']['compute']) == measure_result(run, Measures()).compute

    series = {(row['series'].partition(' (')[0], row['runs']): row for row in table(out / 'ladder.csv')}
    assert {key[1] for key in series if key[0] == 'Softmax'} == {'2'}
    printed = capsys.readouterr().out
    assert 'L(C) = 1.70 + ' in printed
    assert '^(−0.210), in nats per token, by least squares of the mean losses of 4 sizes (8 runs)' in printed
    assert '| 1.50 |' in printed
    text = (out / 'report.md').read_text()
    assert '| FLOPs | effective speed-up | speed-up in time |' in text
    assert '## Ladder' in text
    assert '](ladder.png)' in text
    assert (out / 'ladder.png').exists()
    page = (out / 'report.html').read_text()
    assert '"title": "Ladder"' in page
    assert '"name": "ladder"' in page


def test_the_spread_of_seeds_is_stated(tmp_path):
    climb(tmp_path / 'base', Softmax(), 1.0, seeds=(0, 1))
    for seed, nats in ((0, -0.01), (1, 0.01)):
        for layers in SIZES:
            set_loss(tmp_path / 'base' / f'{layers}-{seed}', 1.0, nats)
    climb(tmp_path / 'ours', Polysketch(), 1.4, sizes=(4,), seeds=(0, 1))
    set_loss(tmp_path / 'ours' / '4-1', 1.6)
    made = make_ladder('base', find_runs([str(tmp_path / 'base')]), find_runs([str(tmp_path / '*')]), Measures())
    assert made.deviation == pytest.approx(math.sqrt(8 * 1e-4 / 5))
    (row,) = [row for row in made.list_rows() if row['series'] != 'Softmax']
    assert row['effective_speedup_low'].value == pytest.approx(1.4, rel=1e-3)
    assert row['effective_speedup_high'].value == pytest.approx(1.6, rel=1e-3)
    assert 1.4 < row['effective_speedup'].value < 1.6
    (picture,) = [p for p in Pictures(find_runs([str(tmp_path / '*')]), Measures(), made).made if p.name == 'ladder']
    curve, softmax, ours = picture.curves
    assert curve.style == softmax.style != ours.style
    assert list(softmax.high - softmax.low) == pytest.approx([0.02] * 4)
    np.testing.assert_allclose(curve.y, LAW.predict(curve.x), atol=1e-3)


def test_seeds_do_not_give_a_size_more_weight(tmp_path):
    climb(tmp_path / 'base', Softmax(), 1.0)
    set_loss(tmp_path / 'base' / '4-0', 1.0, 0.1)

    def fit() -> PowerLaw:
        runs = find_runs([str(tmp_path / 'base')])
        return make_ladder('base', runs, runs, Measures()).law

    before = fit()
    climb(tmp_path / 'base', Softmax(), 1.0, sizes=(4,), seeds=(1, 2))
    for seed in (1, 2):
        set_loss(tmp_path / 'base' / f'4-{seed}', 1.0, 0.1)
    assert vars(fit()) == pytest.approx(vars(before))


def test_the_curve_is_not_extended(tmp_path):
    climb(tmp_path / 'base', Softmax(), 1.0)
    climb(tmp_path / 'ours', Polysketch(), 1.5, sizes=(8,))
    climb(tmp_path / 'worse', Polysketch(sketch_size=8), 0.5, sizes=(2,))
    out = tmp_path / 'out'
    flags = ['--ladder', str(tmp_path / 'base'), '--out', str(out), '--no_pictures']
    assert main(['report', str(tmp_path / '*'), *flags]) == 0
    found = {pathlib.Path(row['path']).parent.name: row for row in table(out / 'runs.csv')}
    most, least = (measure_result(Run.read(tmp_path / 'base' / name), Measures()).compute for name in ('8-0', '2-0'))
    ours, worse = found['ours'], found['worse']
    assert ours['effective_speedup'] == worse['effective_speedup'] == ours['effective_speedup_below'] == ''
    assert float(ours['effective_speedup_above']) == pytest.approx(most / float(ours['compute']))
    assert float(worse['effective_speedup_below']) == pytest.approx(least / float(worse['compute']))
    text = (out / 'report.md').read_text()
    assert re.search(r'\| > 1\.00 \|', text)
    assert re.search(r'\| < 1\.00 \|', text)
    assert '< and > mark bounds' in text


def test_equal_time_needs_equal_devices(tmp_path):
    climb(tmp_path / 'base', Softmax(), 1.0, noise=0.0)
    climb(tmp_path / 'ours', Softmax(window=64), 1.0, sizes=(4, 6), slowness=0.2)
    climb(tmp_path / 'other', Softmax(window=32), 1.0, sizes=(4,), devices=(1, 'TPU v4'))
    made = make_ladder('base', find_runs([str(tmp_path / 'base')]), find_runs([str(tmp_path / '*')]), Measures())
    times = {f'{r.run.directory.path.parent.name}{r.run.name}': made.compare_times(r) for r in made.compared}
    assert times['base4-0'] == pytest.approx(1, rel=1e-3)
    assert times['other4-0'] is None
    # A step takes twice as long. The window of 64 has fewer FLOPs, so the baseline needs less compute than its size.
    seconds = {size: tokens(size) * 0.2e-6 for size in (2, 4, 6, 8)}
    least = measure_result(Run.read(tmp_path / 'ours' / '6-0'), Measures()).compute
    sizes = [measure_result(Run.read(tmp_path / 'base' / f'{size}-0'), Measures()).compute for size in seconds]
    expected = np.exp(np.interp(np.log(least), np.log(sizes), np.log(list(seconds.values())))) / (2 * seconds[6])
    assert times['ours6-0'] == pytest.approx(expected, rel=0.02)


def tokens(layers: int) -> int:
    return SIZES[layers] * 2**20


def test_runs_that_cannot_be_compared_are_named(tmp_path, capsys):
    climb(tmp_path / 'base', Softmax(), 1.0)
    for name in ('young', 'other', 'long'):
        context = 512 if name == 'long' else 1024
        climb(tmp_path / name, Polysketch(), 1.0, sizes=(4,), context=context)
    lines = (tmp_path / 'young' / '4-0' / 'metrics.jsonl').read_text().splitlines(keepends=True)
    (tmp_path / 'young' / '4-0' / 'metrics.jsonl').write_text(''.join(lines[:10]))
    info = json.loads((tmp_path / 'other' / '4-0' / 'run.json').read_text())
    (tmp_path / 'other' / '4-0' / 'run.json').write_text(json.dumps(info | {'data': 'e' * 64}))
    flags = ['--ladder', str(tmp_path / 'base'), '--out', str(tmp_path / 'out'), '--no_pictures']
    assert main(['report', *(str(tmp_path / name) for name in ('young', 'other', 'long')), *flags]) == 0
    assert (
        'Not compared with the baseline: 4-0 (not finished); 4-0 (other data than the baseline); '
        '4-0 (evaluated on another context than the baseline).'
    ) in capsys.readouterr().out
    assert {row['effective_speedup'] for row in table(tmp_path / 'out' / 'runs.csv')[:3]} == {''}


def test_a_baseline_that_gives_no_curve_is_refused_in_one_line(tmp_path, capsys):
    def refuse(runs: str) -> str:
        flags = ['--ladder', str(tmp_path / runs), '--out', str(tmp_path / 'out'), '--no_pictures']
        assert main(['report', str(tmp_path / 'base'), *flags]) == 2
        error = capsys.readouterr().err
        assert error.count('\n') == 1
        assert not (tmp_path / 'out').exists()
        return error

    climb(tmp_path / 'base', Softmax(), 1.0, sizes=(2, 4), seeds=(0, 1))
    assert 'has finished runs at 2 sizes, and a curve needs 3; train other sizes, such as by' in refuse('base')
    climb(tmp_path / 'other', Polysketch(), 1.0, sizes=(6,))
    assert 'its runs have different attention (polysketch, softmax); name the runs of one' in refuse('*[re]*')
    climb(tmp_path / 'rates', Softmax(), 1.0, sizes=(2, 4, 6), seeds=(0, 1))
    config = tmp_path / 'rates' / '4-1' / 'config.gin'
    config.write_text(re.sub(r'(peak_learning_rate = ).*', r'\g<1>0.01', config.read_text()))
    assert 'another run of its size differ in optimizer.peak_learning_rate; name the runs' in refuse('rates')
    climb(tmp_path / 'rising', Softmax(), 1.0, sizes=(2, 4, 6))
    for i, layers in enumerate((2, 4, 6)):
        evaluate(tmp_path / 'rising' / f'{layers}-0', loss=3.0 + i, perplexity=math.exp(3.0 + i))
    assert 'the losses do not fall with compute' in refuse('rising')
    assert 'nowhere: no run is there' in refuse('nowhere')


def test_powers_are_short():
    assert [format_power(value) for value in (1234567, 9.876e10, 3e13)] == ['1.23e6', '9.88e10', '3.00e13']


@pytest.mark.slow  # a whole act of several runs; its parts have tests of their own
def test_a_small_ladder_from_the_sweep_to_the_speedup(tokens, tmp_path, capsys):
    """The losses of tiny runs are real, and so is the order of their sizes."""
    kept = {name: value for name, value in tiny.MODEL.items() if name not in ('model.d_model', 'train.steps')}
    flags = tiny.params(kept | {'data.path': str(tokens)})
    (tmp_path / 'ladder.gin').write_text('zip/model.d_model = [16, 32, 64]\nzip/train.steps = [10, 30, 60]\n')
    root = tmp_path / 'sweep'
    done = tiny.lm('sweep', '--run_dir', str(root), *flags, '--sweep_file', str(tmp_path / 'ladder.gin'))
    assert done.returncode == 0, done.stderr
    assert main(['report', str(root), '--ladder', str(root), '--out', str(tmp_path / 'out')]) == 0
    assert 'of 3 sizes (3 runs)' in capsys.readouterr().out
    rows = sorted(table(tmp_path / 'out' / 'runs.csv'), key=lambda row: float(row['compute']))
    assert [int(row['steps']) for row in rows] == [10, 30, 60]
    losses = [float(row['loss']) for row in rows]
    assert losses == sorted(losses, reverse=True)
    inside = float(rows[1]['effective_speedup'])
    assert 0.5 < inside < 2, 'the curve passes near a run of its own'
