"""`lm report` draws a search: history, importance, and parallel axes."""

import csv
import json

import made_up_runs
import numpy as np
import pytest

from lm.attention.softmax import Softmax
from lm.cli import main
from lm.report.search import ParallelAxes, make_search_pictures, read_searches
from lm.runs import sweep_file


@pytest.fixture(scope='module')
def root(tmp_path_factory):
    """Makes a search of five trials: the third is pruned, the last diverged."""
    root = tmp_path_factory.mktemp('report') / 'search'
    rows = []
    attentions = ('@softmax()', '@polynomial()', '@softmax()', '@polynomial()', '@softmax()')
    for i, attention in enumerate(attentions):
        name, loss = f'trial-{i:04}', (3.0, 2.5, None, 2.75, None)[i]
        status = 'pruned' if i == 2 else 'failed' if i == 4 else 'done'
        settings = {'optimizer.peak_learning_rate': f'{10.0 ** -(i + 1)}', 'model.attention': attention}
        settings |= {'polynomial.degree': '2'} if 'poly' in attention else {}
        row = {'index': i, 'point': name, 'settings': settings, 'status': status, 'step': 100, 'steps': 100}
        rows.append(row | {'loss': loss, 'exit_code': 43 if i == 4 else None, 'error': None})
        made_up_runs.write_run(root / name, Softmax(), steps=500, quality=0.1 * i)
    space = {'model.attention': 'choice(@softmax(), @polynomial())', 'polynomial.degree': 'integers(2, 4)'}
    space = {'optimizer.peak_learning_rate': 'log_uniform(1e-5, 1e-1)', **space}
    importance = {'model.attention': 0.25, 'optimizer.peak_learning_rate': 0.7, 'polynomial.degree': 0.05}
    sweep_file.write_rows(root, rows, {'search': {'sampler': 'tpe', 'space': space, 'importance': importance}})
    return root


def test_the_values_of_the_pictures(root):
    (search,) = read_searches([str(root)])
    history, importance, parallel = make_search_pictures(search)
    trials, best = history.curves
    assert (trials.x.tolist(), trials.y.tolist()) == ([0, 1, 3], [3.0, 2.5, 2.75]), 'pruned and failed trials are none'
    assert best.y.tolist() == [3.0, 2.5, 2.5]
    assert [(curve.label, curve.x[0]) for curve in importance.curves] == [
        *(('peak learning rate', 0.7), ('attention', 0.25), ('degree', 0.05))
    ]
    assert isinstance(parallel, ParallelAxes)
    assert [curve.label for curve in parallel.curves] == ['trial-0000', 'trial-0003', 'trial-0001'], 'the best is last'
    np.testing.assert_allclose([c.y[0] for c in parallel.curves], [1, 0, 2 / 3], atol=1e-12)  # by its logarithm
    assert [c.y[1] for c in parallel.curves] == [1, 0, 0]  # softmax and polynomial
    np.testing.assert_array_equal([c.y[2] for c in parallel.curves], [np.nan, 0, 0])  # no degree without polynomial
    assert [c.y[3] for c in parallel.curves] == [1, 0.5, 0]
    assert parallel.options['ticks'][0] == [(0.0, '0.000100'), (1.0, '0.100')]


def test_the_report_of_a_search(root, tmp_path):
    out = tmp_path / 'out'
    assert main(['report', str(root), '--out', str(out)]) == 0
    text = (out / 'report.md').read_text()
    for name in ('search_history', 'search_importance', 'search_values'):
        assert f']({name}.png)' in text
        assert (out / f'{name}.pdf').stat().st_size > 1000
    page = (out / 'report.html').read_text()
    assert 'Search search' in page
    assert '"name": "search_history"' in page
    points = list(csv.DictReader((out / 'curves.csv').open()))
    assert sum(point['picture'] == 'search_values' for point in points) == 12
    assert json.loads(json.dumps(points))


def test_a_grid_has_no_pictures_of_a_search(root, tmp_path):
    sweep_file.write_rows(tmp_path, sweep_file.read_rows(root))
    assert read_searches([str(tmp_path), str(root / '*'), str(root / 'trial-0000')]) == []
