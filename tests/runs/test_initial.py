"""`train.init_from`: the output lists the arrays of the other run that are used; arrays that do not fit are refused."""

import jax
import numpy as np
import pytest
import tiny

from lm import cli
from lm.checkpoint.checkpointer import Checkpointer
from lm.runs.initial import take_initial
from lm.runs.run_dir import RunDir
from lm.runs.weights import SavedWeights

pytestmark = pytest.mark.usefixtures('kept_programs')


def start(reference_run, tiny_flags, run, **bindings) -> int:
    names = {name.replace('__', '.'): value for name, value in bindings.items()}
    names = {'train.init_from': str(reference_run[0]), 'train.steps': 1, 'optimizer.warmup_steps': 0} | names
    return cli.main(['train', '--run_dir', str(run), *tiny_flags, *tiny.params(names)])


def test_all_arrays_of_the_same_model_are_taken(reference_run, tiny_flags, tmp_path, capsys):
    assert start(reference_run, tiny_flags, tmp_path / 'run') == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if 'arrays taken' in line]
    taken, _, total, *_ = line.split()
    assert taken == total
    assert line.endswith(f'arrays taken from {reference_run[0]} at step 40')


def test_the_arrays_that_were_not_taken_are_named(reference_run, tiny_flags, tmp_path, capsys):
    assert start(reference_run, tiny_flags, tmp_path / 'run', model__attention='@polynomial()') == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if 'arrays taken' in line]
    taken, _, total, *_ = line.split()
    left = line.partition('; these not: ')[2].split(', ')
    assert 0 < int(taken) < int(total) == int(taken) + len(left)
    assert all('attention' in name for name in left)


@pytest.mark.parametrize('n_features', [4, 2])
def test_random_projections_come_with_the_parameters(tmp_path, n_features):
    """Projections of another seed would give other features, and so another function."""

    def weights(value, n_features):
        projection = np.full((2, n_features, 3), value, np.float32)
        return {
            'params': {'out': np.full(3, value, np.float32)},
            'buffers': {'blocks': {0: {'projection': projection}}},
        }

    there, here = weights(0, 4), weights(1, n_features)
    with Checkpointer(RunDir(tmp_path).checkpoints) as checkpointer:
        checkpointer.save(7, there)
    taken, line, _ = take_initial(SavedWeights('train.init_from', str(tmp_path), None, {}), 'data', here, here)
    is_alike = n_features == 4
    jax.tree.map(np.testing.assert_array_equal, taken, there if is_alike else there | {'buffers': here['buffers']})
    rest = '' if is_alike else '; these not: buffers.blocks.0.projection'
    assert line == f'{1 + is_alike} of 2 arrays taken from {tmp_path} at step 7{rest}'


def test_the_mean_of_the_last_weights_is_taken_where_there_is_one(tmp_path):
    """These are the weights that evaluate, generate and export use."""
    part = {'out': np.zeros(3, np.float32)}
    here = {'params': part, 'buffers': {}}
    with Checkpointer(RunDir(tmp_path).checkpoints) as checkpointer:
        checkpointer.save(7, here | {'average': {'out': np.full(3, 2, np.float32)}})
    taken, line, _ = take_initial(SavedWeights('train.init_from', str(tmp_path), None, {}), 'data', here, here)
    np.testing.assert_array_equal(taken['params']['out'], 2)
    assert line == f'1 of 1 arrays taken from {tmp_path} at step 7, the mean of its last weights'


def test_another_tokenizer_is_refused(reference_run, other_tokens, tiny_flags, tmp_path, capsys):
    assert start(reference_run, tiny_flags, tmp_path / 'run', data__path=str(other_tokens)) == 44
    error = capsys.readouterr().err.splitlines()[-1]
    assert f'the tokenizer of {reference_run_data(reference_run)} is ' in error
    assert f'the one of {other_tokens} is ' in error
    assert not (tmp_path / 'run').exists()


def reference_run_data(reference_run) -> str:
    """Returns the data of the reference run as its config.gin has them."""
    (line,) = [x for x in (reference_run[0] / 'config.gin').read_text().splitlines() if x.startswith('data.path = ')]
    return line.removeprefix('data.path = ')


def test_arrays_of_another_shape_are_refused_by_name(reference_run, tiny_flags, tmp_path, capsys):
    assert start(reference_run, tiny_flags, tmp_path / 'run', model__head_dim=8) == 44
    error = capsys.readouterr().err.splitlines()[-1]
    assert f'train.init_from = {str(reference_run[0])!r}' in error
    assert ' there and ' in error
    assert error.count(' here') >= 2
    assert 'embedding' not in error
    assert not (tmp_path / 'run').exists()
    assert start(reference_run, tiny_flags, tmp_path / 'run') == 0


@pytest.mark.parametrize('damage', ['folder', 'nothing'])
def test_a_path_without_a_run_is_refused(reference_run, tiny_flags, tmp_path, capsys, damage):
    if damage == 'folder':
        (tmp_path / 'empty').mkdir()
    assert start(reference_run, tiny_flags, tmp_path / 'run', train__init_from=str(tmp_path / 'empty')) == 44
    assert 'holds no checkpoint' in capsys.readouterr().err
    assert not (tmp_path / 'run').exists()
