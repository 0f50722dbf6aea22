"""`lm check --gradients`: wrong and missing gradients are named; configurations without a fault pass."""

import functools
import json
import types

import jax.numpy as jnp
import numpy as np
import pytest
import shipped

from lm import cli
from lm.attention.hedgehog import Hedgehog
from lm.attention.maps.random_features import Positive
from lm.attention.performer import Performer
from lm.attention.softmax import Softmax
from lm.attention.window_linear import WindowLinear
from lm.check import gradients
from lm.check.gradients import OK, WRONG, ZERO, check_gradients, describe_faults
from lm.check.tiny import shrink
from lm.experiment import Experiment, load
from lm.model import ModelConfig
from lm.model.feed_forward import DenseLayer
from lm.model.feed_forward.experts import Experts, RoutedExperts
from lm.training.config import TrainConfig
from lm.training.objectives.align import Align
from lm.training.optimizer import OptimizerConfig


@pytest.fixture
def short(monkeypatch):
    """Windows are short, but longer than a window of a mechanism and a block."""
    monkeypatch.setattr(gradients, 'LENGTH', 30)
    monkeypatch.setattr(gradients, 'WINDOWS', 1)


def verdicts(found: gradients.GradientCheck) -> dict[str, str]:
    return {one.name: one.verdict for one in found.faults}


# --------------------------------------------------------------------------------------------------------------- faults


def test_a_rescaling_that_does_not_cancel_is_found_by_name(short, monkeypatch):
    """Features of a query are divided by their largest exponential, without a gradient. In Performer alone this factor
    cancels; beside a window of softmax it does not, and was not put back."""
    mixed = WindowLinear(map=Performer(n_features=16), window=5)
    experiment = Experiment(model=ModelConfig(n_layers=2, attention=(mixed, Softmax())))
    assert not check_gradients(experiment).faults
    monkeypatch.setattr(Positive, 'log_divisor', lambda self, wx, half: jnp.zeros_like(half))
    found = check_gradients(experiment)
    norms = {f'blocks/0/attention_norm/{name}' for name in ('bias', 'scale')}
    wrong = {name for name, verdict in verdicts(found).items() if verdict == WRONG}
    assert {'blocks/0/qkv/kernel', *norms} <= wrong <= {'blocks/0/qkv/kernel', *norms, 'embedding/embedding'}
    said = describe_faults(found)
    assert 'in the layer @window_linear(map = @performer()), @dense(): ' in said
    assert 'blocks/0/qkv/kernel' in said
    alone = check_gradients(Experiment(model=ModelConfig(attention=Performer(n_features=16))))
    assert not alone.faults


def test_a_router_of_one_expert_with_weight_1_learns_nothing(short, monkeypatch, capsys):
    route = RoutedExperts._route

    def normalized(self, x_BxLxD):
        chosen_BxLxN, weights_BxLxN, routing = route(self, x_BxLxD)
        return chosen_BxLxN, weights_BxLxN / (weights_BxLxN.sum(axis=-1, keepdims=True) + 1e-20), routing

    bindings = ('model.feed_forward = @experts()', 'experts.top_k = 1', 'experts.normalize = False')
    flags = ['check', '--gradients', *(word for line in bindings for word in ('--gin_param', line))]
    assert cli.main(flags) == 0
    printed = capsys.readouterr().out
    assert 'array' in printed
    assert ZERO not in printed
    monkeypatch.setattr(RoutedExperts, '_route', normalized)
    assert cli.main([*flags, '--json']) == 2
    printed, said = capsys.readouterr()
    found = {one['name']: one for one in json.loads(printed)['gradients']['arrays']}
    assert [name for name, one in found.items() if one['verdict'] != OK] == ['blocks/0/experts/router/kernel']
    assert found['blocks/0/experts/router/kernel']['verdict'] == ZERO
    assert 'blocks/0/experts/router/kernel cannot learn' in said
    assert '@softmax(), @experts()' in said


def test_a_router_that_cannot_learn_is_refused_in_one_line_unless_it_is_frozen(short, capsys):
    bindings = ('model.feed_forward = @experts()', 'experts.top_k = 1', 'experts.normalize = True')
    flags = ['check', '--gradients', *(word for line in bindings for word in ('--gin_param', line))]
    assert cli.main(flags) == 2
    printed, said = capsys.readouterr()
    assert not printed
    (line,) = said.strip().splitlines()
    assert 'experts.normalize = True: ' in line
    assert 'set experts.normalize = False' in line
    assert "optimizer.frozen = ['glu']" in line
    assert cli.main([*flags, '--gin_param', "optimizer.frozen = ['glu']"]) == 0
    (row,) = (row for row in capsys.readouterr().out.splitlines() if 'router' in row)
    assert row.endswith('  ZERO, frozen')


def test_an_objective_for_attention_freezes_routers():
    aligned = Experiment(
        train=TrainConfig(objective=Align(teacher='teacher')), optimizer=OptimizerConfig(frozen=('norms',))
    )
    assert gradients.list_frozen(aligned) == ('norms', 'glu')
    assert gradients.list_frozen(Experiment()) == ()


def make_loss(gradient: np.ndarray, slope: float = 1.0) -> types.SimpleNamespace:
    """Returns the parts of a `TinyLoss` that are read, of |p|² slope / 2."""
    params = [np.arange(1.0, 5.0)]
    loss = types.SimpleNamespace(names=['p'], params=params, round_one=lambda which: 0.0, name_layer=lambda name: '')
    loss.replace = functools.partial(gradients.TinyLoss.replace, loss)
    loss.compute_loss = lambda params: slope * float(params[0] @ params[0]) / 2
    loss.measure_slopes = functools.partial(gradients.TinyLoss.measure_slopes, loss)
    loss.gradient = gradient
    return loss


@pytest.mark.parametrize(
    ('gradient', 'slope', 'verdict'),
    [
        ([1, 2, 3, 4], 1, OK),
        ([1, 2, 3, 4], 1.01, WRONG),
        ([-1, -2, -3, -4], 1, WRONG),
        ([0, 0, 3, 4], 1, WRONG),
        ([0, 0, 0, 0], 1, WRONG),
        ([0, 0, 0, 0], 0, ZERO),
        ([1e-15, 0, 0, 0], 0, ZERO),
        ([1, 2, 3, 4], 0, WRONG),
    ],
)
def test_verdicts(gradient, slope, verdict):
    gradient = np.array(gradient, float)
    found = gradients._check_array(make_loss(gradient, slope), 0, gradient, 30.0)
    assert found.verdict == verdict
    assert (found.error <= gradients.TOLERANCE) == (verdict != WRONG)


def test_rounding_of_weights_moves_logits_by_a_few_thousandths(short):
    found = check_gradients(Experiment(model=ModelConfig(attention=Softmax())))
    assert not found.faults
    assert 1e-4 < found.rounding < 2e-2
    assert all(0 < one.rounding < 2 * found.rounding for one in found.arrays)


# ---------------------------------------------------------------------------------------------------------- tiny models


def test_a_tiny_model_has_every_kind_of_layer_once():
    near, far = Softmax(window=512, n_heads=32, n_kv_heads=8), Hedgehog(head_dim=128, value_dim=256)
    model = ModelConfig(
        n_layers=13,
        attention=(near, near, near, far),
        feed_forward=(DenseLayer(), Experts(n_experts=64, balance=0.01)),
        n_heads=16,
        n_kv_heads=4,
        learned_positions=8192,
        norm='rms',
    )
    tiny = shrink(model)
    assert [type(one) for one in tiny.layers] == [Softmax, Softmax, Hedgehog]
    dense, experts = DenseLayer, Experts
    assert [type(tiny.find_feed_forward(i)) for i in range(3)] == [dense, experts, experts]
    assert tiny.find_feed_forward(1) == Experts(n_experts=8, balance=0.0)
    assert (tiny.norm, tiny.layer.n_heads, tiny.layer.n_kv_heads) == ('rms', 8, 2)
    first, _, last = tiny.layers
    assert (first.window, first.n_heads, first.n_kv_heads) == (11, 8, 2)
    assert last.value_dim > last.head_dim == 8
    assert shrink(ModelConfig(n_layers=12)).n_layers == 2
    assert shrink(tiny) == tiny


def test_sizes_that_other_options_forbid_stay():
    experts = Experts(n_experts=72, groups=9, top_groups=9, top_k=9)
    assert shrink(ModelConfig(feed_forward=experts)).find_feed_forward(0).n_experts == 72


# ----------------------------------------------------------------------------------------------- shipped configurations


@functools.cache
def check_once(model, *others) -> gradients.GradientCheck:
    return gradients.check_loss(model, *others)


@pytest.mark.slow
@pytest.mark.parametrize('path', shipped.SINGLE, ids=lambda path: path.stem)
def test_no_shipped_configuration_is_accused(path):
    experiment = load([str(path)])
    documents = experiment.data.documents(None)
    assert not check_once(shrink(experiment.model), documents, experiment.optimizer.z_loss).faults
