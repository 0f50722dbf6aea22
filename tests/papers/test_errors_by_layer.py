"""The error of Performer with the weights of a softmax model, layer by layer."""

import runpy
import sys
import types

import jax
import numpy as np
import pytest
import tiny

from lm.attention.performer import Performer
from lm.attention.softmax import Softmax
from lm.model import ModelConfig
from lm.model.functions import ModelFunctions

SCRIPT = runpy.run_path(str(tiny.ROOT / 'configs/papers/performer/figure_11/errors_by_layer.py'))
MODEL = ModelConfig(vocab_size=28, n_layers=3, d_model=16, n_heads=2, head_dim=8, attention=Softmax(), causal=False)
TOKENS = jax.random.randint(jax.random.key(0), (2, 20), 0, 28)


def make_run(model: ModelConfig) -> types.SimpleNamespace:
    """Returns a model that was not trained, with windows of random tokens."""
    functions = ModelFunctions(model, np.float32)
    weights = functions.init(0)
    store = types.SimpleNamespace(tokens=lambda split: 41, read_many=lambda *_: np.asarray(TOKENS))
    train, data = types.SimpleNamespace(context_length=20), types.SimpleNamespace(eval_split='validation')
    experiment = types.SimpleNamespace(model=model, train=train, data=data)
    return types.SimpleNamespace(
        experiment=experiment, functions=functions, weights=weights, model=functions.merge(weights), splits=store
    )


@pytest.fixture(scope='module')
def run():
    return make_run(MODEL)


def test_errors_fall_with_the_features_and_rise_with_the_layers(run):
    def errors(n_features: int) -> np.ndarray:
        model = SCRIPT['replace_attention'](run, Performer(n_features=n_features), seed=1)
        return SCRIPT['measure_errors'](run.model, model, TOKENS)

    few, many = errors(4), errors(512)
    assert few.shape == (2, 3)
    assert (many < few).all()
    assert few[0, 0] == few[1, 0], 'nothing comes before the first layer'
    assert (few[0, 1:] > few[1, 1:]).all(), 'errors of earlier layers come through'


def test_the_softmax_model_has_no_error(run):
    np.testing.assert_array_equal(SCRIPT['measure_errors'](run.model, run.model, TOKENS), 0)


def test_the_command_draws_one_picture(run, tmp_path, monkeypatch, capsys):
    main = SCRIPT['main']
    runs = {'runs/x': run, 'runs/y': make_run(ModelConfig(vocab_size=28, attention=Performer(), n_layers=1))}
    monkeypatch.setitem(main.__globals__, 'lm', types.SimpleNamespace(load=runs.get))
    flags = ['--n_features', '4,8', '--draws', '2', '--out', str(tmp_path / 'picture')]
    monkeypatch.setattr(sys, 'argv', ['errors_by_layer.py', 'runs/x', *flags])
    assert main() == 0
    rows = [line.split(' | ')[0] for line in capsys.readouterr().out.splitlines()[2:6]]
    assert rows == ['| M = 4', '| M = 4, alone', '| M = 8', '| M = 8, alone']
    assert sorted(path.name for path in tmp_path.iterdir()) == ['picture.pdf', 'picture.png']
    monkeypatch.setattr(sys, 'argv', ['errors_by_layer.py', 'runs/y'])
    assert main() != 0
    assert 'name a run with @softmax()' in capsys.readouterr().err
