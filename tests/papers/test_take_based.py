"""LLoPS continues a BASED model: it begins with the same function, and the script runs each run once."""

import os
import runpy
import subprocess
import sys

import grids
import numpy as np
import pytest
import tiny

import lm
from lm import cli

FOLDER = tiny.ROOT / 'configs/papers/llops/table_2_continued'
MAIN = runpy.run_path(str(FOLDER / 'take_based.py'))['main']
LLOPS = {
    'model.attention': '[@llops(), @softmax()]',
    'llops.n_features': 20,
    'llops.nonnegative': False,
    'llops.affine': True,
    'llops.layer_norm': False,
    'llops.init': 'based',
    'llops.denominator_bias': 0.0,
}


@pytest.fixture(scope='module')
def based(tiny_flags, tmp_path_factory):
    """Returns a BASED run of a few steps."""
    run = tmp_path_factory.mktemp('based') / 'run'
    model = {'model.attention': '[@taylor(), @softmax()]', 'taylor.feature_dim': 4, 'taylor.per_head': False}
    done = tiny.lm('train', '--run_dir', str(run), *tiny_flags, *tiny.params(model | {'train.steps': 10}))
    assert done.returncode == 0, done.stderr
    return run


def take(monkeypatch, *arguments) -> int:
    monkeypatch.setattr(sys, 'argv', ['take_based.py', *map(str, arguments)])
    return MAIN()


@pytest.mark.parametrize('degree', grids.draw([2, 4], 1))
def test_the_start_computes_what_based_computes_and_a_run_goes_on(degree, based, tiny_flags, tmp_path, monkeypatch):
    model = LLOPS | {'llops.degree': degree}
    assert take(monkeypatch, based, '--run_dir', tmp_path / 'start', *tiny.params(model)) == 0
    tokens = np.arange(32)[None] * 7 % 400
    expected, found = (np.asarray(lm.load(str(run)).model(tokens)) for run in (based, tmp_path / 'start'))
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
    more = {'train.init_from': str(tmp_path / 'start'), 'train.steps': 2, 'optimizer.warmup_steps': 1}
    done = tiny.lm('train', '--run_dir', str(tmp_path / 'run'), *tiny_flags, *tiny.params(model | more))
    assert done.returncode == 0, done.stderr
    assert 'these not' not in done.stdout


@pytest.mark.parametrize(
    ('bindings', 'message'),
    [
        ({'model.attention': '@llops()'}, 'put @llops() into the places of @taylor()'),
        ({'model.attention': '[@llops(), @retention()]'}, 'has @retention() in place of @softmax()'),
        ({'model.attention': '[@llops(), @llops()]'}, 'no @llops() begins as Softmax'),
        ({'llops.denominator_bias': 1.0}, 'begins as BASED only with'),
    ],
)
def test_models_that_do_not_begin_like_based_are_refused(bindings, message, based, tmp_path, monkeypatch, capsys):
    flags = tiny.params(LLOPS | {'llops.degree': 2} | bindings)
    assert take(monkeypatch, based, '--run_dir', tmp_path / 'start', *flags) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count('\n') == 1
    assert not (tmp_path / 'start').exists()


def test_the_script_runs_each_run_with_its_own_start(based, tmp_path, monkeypatch):
    variables = os.environ | {'LM': 'echo', 'PYTHON': 'echo'}
    root = tmp_path / 'continued'
    command = [FOLDER / 'continue.sh', str(based), str(root), '--set', 'train.log_every=5']
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tiny.ROOT)
    starts = {}
    for line in done.stdout.splitlines():
        words = line.split()  # no word has a space
        assert 'train.log_every=5' in words
        if words[0] == 'train':
            assert cli.VERBS['train'].make_call(cli.parse(words))
            run = words[words.index('--run_dir') + 1].rpartition('/')[2]
            starts[run] = next(word for word in words if word.startswith('train.init_from'))
    assert set(starts) == {f'{name}_{seed}' for name in ('based', 'llops_2', 'llops_4') for seed in (1, 2)}
    assert starts['based_1'] == f"train.init_from='{based}'"
    assert starts['llops_4_2'] == f"train.init_from='{root}/start_4'"
    done = subprocess.run([FOLDER / 'continue.sh', 'nowhere'], capture_output=True, text=True)
    assert done.returncode == 2
    assert 'name the run of BASED' in done.stderr
