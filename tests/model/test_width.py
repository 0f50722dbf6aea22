"""Widths: the scales of every parameter, the changes of a step at several widths, and no change without a
base width."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import tree_leaves_with_path
from tiny import train_step

from lm.attention.polysketch import Polysketch
from lm.attention.softmax import Softmax
from lm.config.text import dump
from lm.errors import ConfigError
from lm.experiment import Experiment, load
from lm.model import ModelConfig
from lm.training.optimizer import OptimizerConfig
from lm.training.rules.adamw import AdamW
from lm.training.rules.muon import Muon
from lm.training.schedules.constant import Constant

RULES = {'adamw': AdamW(), 'muon': Muon()}


def config(width: int, base: int | None = None, **changes) -> ModelConfig:
    options = dict(vocab_size=64, n_layers=2, head_dim=16, attention=Softmax()) | changes
    return ModelConfig(d_model=width, n_heads=width // 16, base_width=base, **options)


def optimizer(rule, **changes) -> OptimizerConfig:
    options = dict(peak_learning_rate=2e-3, warmup_steps=0, schedule=Constant(), weight_decay=0.0) | changes
    return OptimizerConfig(rule=rule, **options)


def by_path(tree) -> dict:
    return {'.'.join(str(getattr(key, 'key', key)) for key in path): x for path, x in tree_leaves_with_path(tree)}


def first_updates(model: ModelConfig, rule, widening: float, **changes) -> dict:
    """Returns path → the first update, from gradients that are the same for any widening."""
    step = train_step(model, optimizer(rule), 10)
    params = jax.eval_shape(lambda: step.init(0))['params']
    draw = np.random.default_rng(0).normal
    gradients = jax.tree.map(lambda x: jnp.asarray(draw(size=x.shape), jnp.float32), params)
    transform = optimizer(rule, **changes).build(10, step.functions.declared, widening)
    updates = jax.jit(lambda x: transform.update(x, transform.init(x), x)[0])(gradients)
    return by_path(updates)


MATRICES = ('qkv.kernel', 'attention_out.kernel', 'glu_in.kernel', 'glu_out.kernel', 'mechanism_in.kernel')
OUTPUTS = ('embedding.embedding', 'head', 'final_norm.scale', 'final_norm.bias')


@pytest.mark.parametrize(('rule', 'hidden'), [('adamw', 1 / 4), ('muon', 1 / 2)])
def test_the_scales_of_every_parameter(rule, hidden):
    """The model has four times the base width. Parameters within a head do not depend on the width."""
    attention = Polysketch(sketch_size=8, block=8, gate=True)
    model = config(64, tied=False, biases=True, attention=attention)
    plain, wide = (first_updates(model, RULES[rule], widening) for widening in (1.0, 4.0))
    for path, update in plain.items():
        if path.endswith(MATRICES):
            expected = hidden
        elif path in OUTPUTS:
            expected = 1 / 2
        else:
            assert path.startswith('blocks.0.'), path
            assert '.attention.' in path or path.endswith(('_norm.scale', '.bias')), path
            expected = 1
        np.testing.assert_allclose(wide[path], expected * update, rtol=1e-5, err_msg=path)
    assert sum(path.endswith(MATRICES) for path in plain) == len(MATRICES)
    assert set(OUTPUTS) < plain.keys()
    assert any('.attention.' in path and update.ndim > 3 for path, update in plain.items()), 'stacked matrices'


@pytest.mark.parametrize('rule', RULES.values(), ids=RULES.keys())
def test_decay_is_the_same_at_all_widths(rule):
    """The update is the rule's update, scaled, and a fraction of the parameter, which is not scaled."""
    model, name = config(64), 'blocks.0.glu_in.kernel'
    of = {(w, d): first_updates(model, rule, w, weight_decay=d)[name] for w in (1.0, 4.0) for d in (0.0, 0.5)}
    np.testing.assert_allclose(of[4.0, 0.5] - of[4.0, 0.0], of[1.0, 0.5] - of[1.0, 0.0], atol=1e-7)
    assert np.abs(of[4.0, 0.5] - of[4.0, 0.0]).max() > 1e-4


def changes(width: int, base: int | None, rule: str, tied: bool) -> tuple[float, float]:
    """Returns the root mean square of the changes by 3 steps: of the second layer's queries, and of the logits."""
    step = train_step(config(width, base, tied=tied), optimizer(RULES[rule], clip_norm=None), 10)
    tokens = np.random.default_rng(0).integers(0, 64, (1, 8, 17))
    tokens[0, :, 8:] = tokens[0, :, :9]  # something to learn

    def activations(state):
        model = step.functions.merge(state)
        return list(model.attention_inputs(tokens[0, :, :-1]))[1][1], model(tokens[0, :, :-1])

    @jax.jit
    def run():
        before = step.init(0)
        after, _ = jax.lax.scan(lambda state, _: step.train(state, jnp.asarray(tokens)), before, length=3)
        pairs = zip(activations(before), activations(after), strict=True)
        return [jnp.sqrt(jnp.mean((new - old) ** 2)) for old, new in pairs]

    return tuple(map(float, run()))


@pytest.mark.parametrize(('rule', 'tied'), [('adamw', True), ('adamw', False), ('muon', True)])
def test_steps_change_activations_and_logits_alike_at_all_widths(rule, tied):
    """The coordinate check of Yang et al. (2022) at four times the base width; without a base width both
    changes grow."""
    narrow, wide, plain = (changes(*widths, rule, tied) for widths in ((64, 64), (256, 64), (256, None)))
    for of_narrow, of_wide, unscaled in zip(narrow, wide, plain, strict=True):
        assert 0.6 < of_wide / of_narrow < 1.2
        assert unscaled / of_narrow > 1.5


@pytest.mark.parametrize('tied', [True, False], ids=['tied', 'untied'])
def test_the_base_width_itself_trains_as_without_one(tied):
    """The program is the same to the letter, so the bits are the same."""
    programs = []
    for base in (None, 64):
        step = train_step(config(64, base, tied=tied), optimizer(Muon(), weight_decay=0.1), 10)
        state, batch = step.abstract, jax.ShapeDtypeStruct((1, 4, 17), jnp.int32)
        programs.append(jax.jit(step.init).lower(0).as_text() + jax.jit(step.train).lower(state, batch).as_text())
    assert programs[0] == programs[1]
    wide = train_step(config(64, 32, tied=tied), optimizer(Muon(), weight_decay=0.1), 10)
    assert jax.jit(wide.train).lower(state, batch).as_text() != programs[0]
    assert jax.tree.structure(wide.abstract) == jax.tree.structure(state), 'checkpoints have one form'


def test_logits_start_smaller_in_a_wider_model():
    """The factor is 1/√m: Yang et al. (2022), Table 8, with an output matrix of initial size 1/√D."""
    tokens = np.random.default_rng(0).integers(0, 64, (4, 16))

    def size(base):
        step = train_step(config(256, base), optimizer(AdamW()), 10)
        state = jax.jit(step.init)(0)
        return float(jnp.std(step.functions.merge(state)(tokens)))

    assert size(64) == pytest.approx(size(None) / 2, rel=1e-4)


def test_a_base_width_is_one_binding():
    experiment = load([], ['model.base_width = 256'])
    assert experiment.model.widening == 3
    assert load([], []).model.widening == 1
    assert load([], [line for line in dump(experiment).splitlines() if '=' in line]) == experiment
    assert Experiment().model.base_width is None


@pytest.mark.parametrize('value', [0, -64, 1])
def test_a_wrong_base_width_is_refused(value):
    with pytest.raises(ConfigError, match=rf'model\.base_width = {value}: must be at least 2'):
        load([], [f'model.base_width = {value}'])
