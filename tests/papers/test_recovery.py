"""The accuracy of Performer with the weights of a softmax model, before and after tuning."""

import runpy
import sys

import pytest
import tiny

from lm.runs.records import to_json

MAIN = runpy.run_path(str(tiny.ROOT / 'configs/papers/performer/figure_3/recovery.py'))['main']


@pytest.fixture
def compare(tmp_path, monkeypatch, capsys):
    """Returns a function that runs the command in a folder and returns (exit code, stdout, stderr)."""

    def call(folder) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, 'argv', ['recovery.py', str(folder), '--out', str(tmp_path / 'picture')])
        code = MAIN()
        return code, *capsys.readouterr()

    return call


def write_sweep(folder, *names: str) -> None:
    points = [
        {'point': name, 'status': 'done', 'settings': {}, 'step': 4, 'steps': 4, 'exit_code': None} for name in names
    ]
    (folder / 'sweep.json').write_text(to_json({'kind': 'sweep', 'points': points}))


@pytest.mark.slow  # a whole act of several runs; its parts have tests of their own
def test_softmax_with_its_own_weights_is_where_it_was_and_performer_not(reference_run, tiny_flags, tmp_path, compare):
    start = {
        'train.init_from': str(reference_run[0]),
        'train.steps': 4,
        'train.eval_every': 2,
        'evaluate.accuracy': True,
        'optimizer.warmup_steps': 1,
    }
    attentions = {'same': {'model.attention': '@softmax()'}, 'other': {'model.attention': '@performer()'}}
    attentions['other'] |= {'performer.n_features': 2}
    for name, bindings in attentions.items():
        done = tiny.lm('train', '--run_dir', str(tmp_path / name), *tiny_flags, *tiny.params(start | bindings))
        assert done.returncode == 0, done.stderr
    write_sweep(tmp_path, *attentions, 'waiting')
    code, out, error = compare(tmp_path)
    assert code == 0, error
    rows = [[cell.strip() for cell in line.strip('|').split('|')] for line in out.splitlines()[2:5]]
    softmax, same, other = rows
    assert [row[0] for row in rows] == ['softmax', 'same', 'other']
    assert same[1:3] == softmax[1:3], 'nothing has changed before the first step'
    assert other[1:3] != softmax[1:3]
    assert float(other[4]) < float(other[2]), 'tuning lowers the perplexity'
    assert same[5] == '2', 'the first evaluation has 90 % of the accuracy'
    assert (tmp_path / 'picture.png').exists()


def test_a_sweep_that_did_not_begin_is_one_error_line(compare, tmp_path):
    write_sweep(tmp_path)
    code, _, error = compare(tmp_path)
    assert code != 0
    assert 'run the sweep first' in error
    assert error.count('\n') == 1
