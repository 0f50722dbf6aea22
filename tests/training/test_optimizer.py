"""Update rules and schedules: one file each, found automatically; bindings of earlier versions keep their meaning."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from tiny import train_step

from lm.attention.softmax import Softmax
from lm.check.advice import BYTES_A_PARAMETER
from lm.config.configurable import REGISTRY, configurable, field
from lm.config.text import dump
from lm.errors import ConfigError
from lm.experiment import Experiment, load
from lm.model import ModelConfig
from lm.parameters import Declaration
from lm.pod.mesh import MeshConfig, make_mesh, place
from lm.runs.config_diff import compare_texts
from lm.training.optimizer import OptimizerConfig
from lm.training.rules import Rule
from lm.training.rules.adamw import AdamW
from lm.training.rules.muon import Muon
from lm.training.schedules import Schedule
from lm.training.schedules.constant import Constant
from lm.training.schedules.cosine import Cosine
from lm.training.schedules.linear import Linear
from lm.training.schedules.wsd import Wsd

MODEL = ModelConfig(vocab_size=64, n_layers=1, d_model=16, n_heads=1, head_dim=16, attention=Softmax())


DECLARED = {
    'kernel': Declaration('matrix', ('embed', 'mlp')),
    'bias': Declaration('bias', ('mlp',)),
}


@configurable('test_sign')
class Sign(Rule):
    """The sign of a running mean of the gradients: a new rule needs no more than this."""

    momentum: float = field(default=0.5, minimum=0, below=1)

    def build(self, declared) -> optax.GradientTransformation:
        sign = optax.stateless(lambda mean, _: jax.tree.map(jnp.sign, mean))
        return optax.chain(optax.ema(self.momentum, debias=False), sign)


@configurable('test_identity')
class Identity(Rule):
    """The gradients themselves."""

    def build(self, declared) -> optax.GradientTransformation:
        return optax.identity()


def of(base: type) -> list[type]:
    """Returns the configurables of a kind that the project ships."""
    return [cls for name, cls in REGISTRY.items() if issubclass(cls, base) and not name.startswith('test_')]


def listed(base: type) -> str:
    """Returns the list of the configurables of a kind, as an error message shows it."""
    names = sorted(name for name, cls in REGISTRY.items() if issubclass(cls, base))
    return re.escape(f'must be one of {", ".join(f"@{name}()" for name in names)}')


def test_rules_and_schedules_are_found():
    assert AdamW in of(Rule)
    assert {Linear, Cosine, Constant, Wsd} <= set(of(Schedule))
    with pytest.raises(ConfigError, match=rf"optimizer\.rule = 'adamw': {listed(Rule)}"):
        load([], ["optimizer.rule = 'adamw'"])


def test_a_rule_is_one_class():
    experiment = load([], ['optimizer.rule = @test_sign()', 'test_sign.momentum = 0', 'optimizer.weight_decay = 0',
                           'optimizer.warmup_steps = 0', 'optimizer.peak_learning_rate = 0.125'])  # fmt: skip
    assert load([], [line for line in dump(experiment).splitlines() if '=' in line]) == experiment
    step = train_step(MODEL, experiment.optimizer, 10)
    before = jax.jit(step.init)(0)
    batch = np.random.default_rng(0).integers(0, 64, (1, 4, 17)).astype(np.uint16)
    after, metrics = jax.jit(step.train)(before, batch)
    assert float(metrics['learning_rate']) == 0.125
    steps = {
        float(x)
        for a, b in zip(*(jax.tree.leaves(s['params']['blocks']) for s in (after, before)), strict=True)
        for x in np.unique(np.round(np.asarray(a - b), 5))
    }
    assert steps <= {-0.125, 0.0, 0.125}
    assert len(steps) > 1


def test_muon_moves_each_matrix_equally_in_all_directions():
    """Each layer and each of the stacked matrices counts separately, tall or wide, for any size of the gradient."""
    declared = {
        'wide': Declaration('matrix', ('layer', 'embed', 'mlp'), pieces=(40, 24, 24)),
        'tall': Declaration('matrix', ('mlp', 'embed')),
        'zero': Declaration('matrix', ('mlp', 'embed')),
    }
    draw = np.random.default_rng(0).normal
    gradients = {'wide': draw(size=(3, 16, 88)), 'tall': draw(size=(48, 16)) * 1e-6, 'zero': np.zeros((48, 16))}
    gradients['wide'] *= np.array([1e-25, 1, 1e25])[:, None, None]
    transform = Muon(rms=0.3).build(declared)
    directions, _ = transform.update(gradients := jax.tree.map(jnp.float32, gradients), transform.init(gradients))
    assert not directions['zero'].any()
    layers = [np.split(layer, [40, 64], axis=-1) for layer in np.asarray(directions['wide'])]
    for x in [*(piece for layer in layers for piece in layer), np.asarray(directions['tall'])]:
        values = np.linalg.svd(x, compute_uv=False) / (0.3 * max(x.shape) ** 0.5)
        assert values.min() > 0.5
        assert values.max() < 1.3
    u, _, v = np.linalg.svd(gradients['tall'], full_matrices=False)
    np.testing.assert_array_less(0.6, np.diag(u.T @ directions['tall'] @ v.T) / (0.3 * 48**0.5))


def test_muon_leaves_other_parameters_to_another_rule():
    step = train_step(MODEL, OptimizerConfig(warmup_steps=1), 10)
    params = jax.eval_shape(lambda: step.init(0))['params']
    gradients = jax.tree.map(lambda x: jnp.sin(1 + jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape), params)

    def directions(rule):
        transform = rule.build(step.functions.declared)
        return jax.jit(lambda x: transform.update(x, transform.init(x))[0])(gradients)

    ours, theirs = directions(Muon(rest=AdamW(b1=0.5))), directions(AdamW(b1=0.5))
    same = jax.tree.map(lambda a, b: bool(jnp.allclose(a, b, rtol=1e-5)), ours, theirs)
    assert same == jax.tree.map(lambda told: told.kind != 'matrix', step.functions.declared)


def test_muon_exchanges_nothing_inside_its_iteration():
    mesh = make_mesh(MeshConfig(fsdp=4))
    declared = {'kernel': Declaration('matrix', ('layer', 'embed', 'mlp'), pieces=(64, 64))}
    transform, gradients = Muon().build(declared), {'kernel': jax.ShapeDtypeStruct((8, 64, 128), jnp.float32)}
    state = place(jax.eval_shape(transform.init, gradients), mesh, declared)
    gradients = place(gradients, mesh, declared)
    assert gradients['kernel'].sharding.spec == PartitionSpec(None, 'fsdp')
    lies = jax.tree.map(lambda leaf: leaf.sharding, (gradients, state))
    with jax.set_mesh(mesh):
        program = jax.jit(transform.update, out_shardings=lies).lower(gradients, state).compile().as_text()
    assert program.count(' all-to-all(') == 3  # one there, and one back for each of the two matrices
    assert not re.search(r' (all-gather|all-reduce|reduce-scatter|collective-permute)\(', program)


def test_rules_declare_the_bytes_of_their_state():
    assert AdamW().state_bytes() == 8
    assert Muon().state_bytes() == Sign().state_bytes() == 4
    assert Sign().state_bytes() == 4
    assert Identity().state_bytes() == 0
    assert jnp.zeros(()).dtype.itemsize == BYTES_A_PARAMETER


@pytest.mark.parametrize('rule', of(Rule))
def test_every_rule_goes_downhill(rule):
    """The first direction leads downhill, for a matrix and for a vector; the state keeps its shape."""
    params = {'kernel': jnp.ones((8, 4)), 'bias': jnp.full((4,), -1.0)}
    transform = rule().build(DECLARED)
    state = transform.init(params)
    directions, new = transform.update(params, state, params)
    assert all(float(jnp.sum(d * g)) > 0 for d, g in zip(*map(jax.tree.leaves, (directions, params)), strict=True))
    assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, state)


@pytest.mark.parametrize('schedule', of(Schedule))
def test_every_schedule_starts_at_the_peak_and_stays_between_it_and_zero(schedule):
    rate = OptimizerConfig(schedule=schedule(), peak_learning_rate=0.5, warmup_steps=4).build_schedule(20)
    values = [float(rate(i)) for i in range(21)]
    np.testing.assert_allclose(values[:5], [0.125, 0.25, 0.375, 0.5, 0.5], rtol=1e-6)
    assert all(0 <= value <= 0.5 + 1e-6 for value in values)


def test_schedules_end_at_their_final_rate():
    ends = {Linear(): 0, Cosine(): 0, Constant(): 0.5}
    ends |= {Linear(final_fraction=0.1): 0.05, Cosine(final_fraction=0.1): 0.05}
    for schedule, end in ends.items():
        assert float(schedule.build(0.5, 16)(16)) == pytest.approx(end, abs=1e-7)
    assert float(Linear(final_fraction=0.5).build(1.0, 16)(8)) == pytest.approx(0.75)
    assert float(Cosine(final_fraction=0.5).build(1.0, 16)(4)) == pytest.approx(0.5 + 0.25 * (1 + np.sqrt(0.5)))


@pytest.mark.parametrize(
    ('shape', 'half'), [('linear', 0.5), ('cosine', 0.5), ('sqrt', 1 - np.sqrt(0.5))], ids=lambda x: str(x)[:6]
)
def test_wsd_is_stable_and_then_decays(shape, half):
    rate = Wsd(decay_share=0.25, shape=shape, final_fraction=0.2).build(2.0, 16)
    np.testing.assert_allclose([float(rate(i)) for i in (0, 7, 12)], 2.0)
    np.testing.assert_allclose([float(rate(14)), float(rate(16))], [2 * (0.2 + 0.8 * half), 0.4], rtol=1e-6)
    longer = Wsd(decay_share=0.25, shape=shape).build(2.0, 32)
    assert [float(longer(i)) for i in range(25)] == [2.0] * 25, 'before the decay the length does not matter'


def test_wsd_takes_the_number_of_steps_of_the_decay():
    """A branch of 5,000 steps at step 50,000, after 10,000 steps of warm-up, needs no share worked out by hand."""
    steps, share = Wsd(decay_steps=5000).build(2.0, 45_000), Wsd(decay_share=5000 / 45_000).build(2.0, 45_000)
    for i in (0, 39_999, 40_000, 40_001, 42_500, 45_000):
        assert float(steps(i)) == pytest.approx(float(share(i)), rel=1e-6)
    with pytest.raises(ConfigError, match=r'wsd.decay_steps = 5 and wsd.decay_share = 0.2: give one of them'):
        Wsd(decay_steps=5, decay_share=0.2)
    with pytest.raises(ConfigError, match=r'wsd.decay_steps = 17: more than the 16 updates after the warm-up'):
        Wsd(decay_steps=17).build(2.0, 16)
    # A complete configuration repeats the default of the share.
    bindings = ['optimizer.schedule = @wsd()', 'wsd.decay_share = 0.1', 'wsd.decay_steps = 5']
    assert load([], bindings).optimizer.schedule == Wsd(decay_steps=5)


def direction(config: OptimizerConfig, params: dict, gradients: dict, decayed: dict) -> dict:
    """Returns the first update of parameters by gradients, in a schedule of 10 steps."""
    declared = {name: Declaration('matrix' if value else 'gain', ('embed',)) for name, value in decayed.items()}
    transform = config.build(10, declared)
    return transform.update(gradients, transform.init(params), params)[0]


def test_weight_decay_changes_only_declared_parameters():
    params = {'matrix': jnp.full((2, 2), 3.0), 'gain': jnp.full((2,), 3.0)}
    zeros, decayed = jax.tree.map(jnp.zeros_like, params), {'matrix': True, 'gain': False}
    config = OptimizerConfig(peak_learning_rate=0.5, warmup_steps=0, weight_decay=0.25, schedule=Constant())
    update = direction(config, params, zeros, decayed)
    np.testing.assert_allclose(update['matrix'], -0.5 * 0.25 * 3.0, rtol=1e-6)
    assert not np.any(update['gain'])


def test_cautious_decay_never_works_against_the_step():
    params = {'matrix': jnp.array([3.0, -3.0, 3.0, -3.0, 3.0]), 'gain': jnp.array([3.0])}
    gradients = {'matrix': jnp.array([1.0, -1.0, -1.0, 1.0, 0.0]), 'gain': jnp.array([1.0])}
    plain = {'peak_learning_rate': 0.5, 'warmup_steps': 0, 'weight_decay': 0.25, 'clip_norm': None}
    config = OptimizerConfig(**plain, schedule=Constant(), rule=Identity(), cautious=True)
    update = direction(config, params, gradients, {'matrix': True, 'gain': False})
    decay = 0.25 * 3.0
    np.testing.assert_allclose(update['matrix'], -0.5 * np.array([1 + decay, -1 - decay, -1, 1, 0]), rtol=1e-6)
    np.testing.assert_allclose(update['gain'], [-0.5], rtol=1e-6)


@pytest.mark.parametrize('widening', [1.0, 4.0])
def test_rates_of_embeddings_head_and_gains(widening):
    declared = {
        'embedding': Declaration('embedding', ('vocabulary', 'embed')),
        'head': Declaration('matrix', ('vocabulary', 'embed'), output=True),
        'gain': Declaration('gain', ('embed',)),
        'bias': Declaration('bias', ('embed',)),
        'matrix': Declaration('matrix', ('embed', 'mlp')),
    }
    ones = {name: jnp.ones([2] * len(one.axes)) for name, one in declared.items()}
    plain = {'warmup_steps': 0, 'schedule': Constant(), 'rule': Identity(), 'weight_decay': 0.0, 'clip_norm': None}

    def updates(**rates):
        transform = OptimizerConfig(**plain, **rates).build(10, declared, widening)
        return transform.update(ones, transform.init(ones), ones)[0]

    new, old = updates(embedding_rate=2.0, head_rate=0.5, gain_rate=0.25), updates()
    factors = {name: float(new[name].ravel()[0] / old[name].ravel()[0]) for name in declared}
    assert factors == {'embedding': 2.0, 'head': 0.5, 'gain': 0.25, 'bias': 0.25, 'matrix': 1.0}


@pytest.mark.parametrize('cautious', [False, True])
def test_the_rate_of_the_head_is_the_rate_of_its_decay_too(cautious):
    declared = {
        'head': Declaration('matrix', ('vocabulary', 'embed'), output=True),
        'matrix': Declaration('matrix', ('embed', 'mlp')),
    }
    ones = {name: jnp.ones([2, 2]) for name in declared}
    plain = {'warmup_steps': 0, 'schedule': Constant(), 'rule': Identity(), 'peak_learning_rate': 1.0}

    def update(**options):
        transform = OptimizerConfig(**plain, cautious=cautious, weight_decay=0.5, **options).build(10, declared)
        new = transform.update({name: 0.1 * one for name, one in ones.items()}, transform.init(ones), ones)[0]
        return {name: float(leaf[0, 0]) for name, leaf in new.items()}

    assert update() == pytest.approx({'head': -0.6, 'matrix': -0.6})
    assert update(head_rate=0.5) == pytest.approx({'head': -0.3, 'matrix': -0.6})
    assert update(head_rate=0.0) == pytest.approx({'head': 0.0, 'matrix': -0.6})


def test_the_mean_covers_the_last_tenth_and_then_the_last_steps():
    config, mean, weights = OptimizerConfig(average_steps=5), jnp.zeros(()), np.zeros(0)
    for step in range(1, 101):
        mean = config.average(mean, jnp.float32(step), jnp.int32(step))
        share = 1 / min(5, 1 + step / 10)
        weights = np.append(weights * (1 - share), share)
        assert float(mean) == pytest.approx(weights @ np.arange(1, step + 1), rel=1e-5)
    assert 100 - float(mean) == pytest.approx(4, abs=0.1)


def test_gradients_are_clipped_to_a_global_norm_or_not_at_all():
    params = {'a': jnp.zeros(2), 'b': jnp.zeros(2)}
    gradients, decayed = {'a': jnp.array([3.0, 0.0]), 'b': jnp.array([0.0, 4.0])}, {'a': True, 'b': True}
    plain = {'peak_learning_rate': 1.0, 'warmup_steps': 0, 'schedule': Constant(), 'rule': Identity()}
    for norm, factor in ((1.0, 0.2), (2.5, 0.5), (None, 1.0), (6.0, 1.0)):
        update = direction(OptimizerConfig(**plain, clip_norm=norm), params, gradients, decayed)
        np.testing.assert_allclose(update['a'], [-3.0 * factor, 0.0], rtol=1e-6)
        np.testing.assert_allclose(update['b'], [0.0, -4.0 * factor], rtol=1e-6)


def test_adam_equals_its_authors_formula():
    transform = AdamW(b1=0.75, b2=0.5, epsilon=0.125).build({})
    state, mean, square, g = transform.init(jnp.zeros(3)), np.zeros(3), np.zeros(3), np.array([1.0, -2.0, 0.5])
    for t in range(1, 4):
        update, state = transform.update(jnp.asarray(g, jnp.float32), state)
        mean, square = 0.75 * mean + 0.25 * g, 0.5 * square + 0.5 * g**2
        expected = mean / (1 - 0.75**t) / (np.sqrt(square / (1 - 0.5**t)) + 0.125)
        np.testing.assert_allclose(update, expected, rtol=1e-5)
        g += np.array([0.5, 0.25, -2.0])


@pytest.mark.parametrize(
    'binding',
    [
        *('adamw.b1 = -0.1', 'adamw.b1 = 1', 'adamw.b2 = -0.1', 'adamw.b2 = 1', 'adamw.epsilon = 0'),
        *('optimizer.peak_learning_rate = 0', 'optimizer.warmup_steps = -1', 'optimizer.weight_decay = -0.1'),
        *('optimizer.clip_norm = 0', 'linear.final_fraction = -0.1', 'linear.final_fraction = 1.1'),
        *('cosine.final_fraction = -0.1', 'cosine.final_fraction = 1.1'),
    ],
)
def test_values_outside_their_range_are_refused(binding):
    name, _, value = binding.partition(' = ')
    choice = ['optimizer.schedule = @cosine()'] if name.startswith('cosine') else []
    with pytest.raises(ConfigError, match=rf'{name} = {value}'):
        load([], [binding, *choice])


def test_zero_and_one_are_allowed_where_they_make_sense():
    bindings = ['adamw.b1 = 0', 'adamw.b2 = 0', 'optimizer.warmup_steps = 0', 'optimizer.weight_decay = 0']
    for schedule in ('linear', 'cosine'):
        choice = [f'optimizer.schedule = @{schedule}()', f'{schedule}.final_fraction = 1']
        optimizer = load([], [*bindings, *choice]).optimizer
        assert (optimizer.rule.b1, optimizer.rule.b2, optimizer.weight_decay, optimizer.warmup_steps) == (0, 0, 0, 0)
        assert optimizer.schedule.final_fraction == 1


def test_the_defaults_equal_the_papers():
    assert OptimizerConfig() == OptimizerConfig(
        rule=AdamW(b1=0.95, b2=0.98, epsilon=1e-8),
        schedule=Linear(final_fraction=0.0),
        peak_learning_rate=7e-4,
        warmup_steps=10_000,
        weight_decay=0.1,
        clip_norm=1.0,
    )
    assert Cosine() == Cosine(final_fraction=0.0)
    assert [schedule.is_open_ended for schedule in (Linear, Cosine, Constant)] == [False, False, True]


def test_the_warm_up_counts_from_one():
    configs = {w: OptimizerConfig(peak_learning_rate=1.0, warmup_steps=w, schedule=Constant()) for w in (0, 1, 2, 3)}
    starts = {w: [float(config.build_schedule(9)(i)) for i in range(4)] for w, config in configs.items()}
    assert starts[0] == starts[1] == [1, 1, 1, 1]
    assert starts[2] == [0.5, 1, 1, 1]
    np.testing.assert_allclose(starts[3], [1 / 3, 2 / 3, 1, 1], rtol=1e-6)
    # The schedule begins when the warm-up has ended, and ends with the run.
    rate = OptimizerConfig(peak_learning_rate=1.0, warmup_steps=2, schedule=Linear()).build_schedule(6)
    np.testing.assert_allclose([rate(i) for i in range(7)], [0.5, 1, 1, 0.75, 0.5, 0.25, 0], atol=1e-6)
    with pytest.raises(ConfigError, match=r'optimizer\.warmup_steps = 9: must be below train\.steps = 9'):
        OptimizerConfig(warmup_steps=9).build_schedule(9)
    assert float(OptimizerConfig(warmup_steps=8).build_schedule(9)(8)) == pytest.approx(7e-4)


def test_the_state_has_the_form_of_earlier_checkpoints():
    """Checkpoints from before rules were choices still restore: these paths name their arrays."""
    step = train_step(MODEL, OptimizerConfig(warmup_steps=1), 10)
    state = jax.eval_shape(lambda: step.init(0))['optimizer']
    paths = {jax.tree_util.keystr(path).partition("['")[0] for path, _ in jax.tree_util.tree_leaves_with_path(state)}
    assert paths == {'[1].count', '[1].mu', '[1].nu', '[3].count'}


OLD = """
optimizer.b1 = 0.9
optimizer.b2 = 0.99
optimizer.clip_norm = 1.0
optimizer.decay = 'DECAY'
optimizer.epsilon = 1e-06
optimizer.final_fraction = 0.25
optimizer.peak_learning_rate = 0.0007
optimizer.warmup_steps = 10000
optimizer.weight_decay = 0.1
"""
"""The section as earlier versions wrote it to config.gin."""


@pytest.mark.parametrize('schedule', [Linear(final_fraction=0.25), Cosine(final_fraction=0.25), Constant()])
def test_a_run_of_an_earlier_version_keeps_its_optimizer(schedule, tmp_path):
    new = dump(Experiment(optimizer=OptimizerConfig(rule=AdamW(b1=0.9, b2=0.99, epsilon=1e-6), schedule=schedule)))
    own = ('optimizer.', 'adamw.', f'{schedule.gin_name}.', '#')
    lines = [line for line in new.splitlines() if not line.startswith(own)]
    old = '\n'.join(lines) + OLD.replace('DECAY', schedule.gin_name)
    assert compare_texts(old, new) == []
    (tmp_path / 'config.gin').write_text(old)
    path = str(tmp_path / 'config.gin')
    for experiment in (load([path]), load([], base=path)):
        assert dump(experiment) == new
    changed = dump(load([], ['optimizer.b1 = 0.5'], base=path))
    assert compare_texts(old, changed) == [('adamw.b1', '0.9', '0.5')]
    if schedule != Cosine(final_fraction=0.25):
        changed = dump(load([], ["optimizer.decay = 'cosine'"], base=path))
        assert ('optimizer.schedule', f'@{schedule.gin_name}()', '@cosine()') in compare_texts(old, changed)


def test_earlier_names_in_a_users_file_still_work():
    assert load([], ['optimizer.b1 = 0.5']).optimizer == OptimizerConfig(rule=AdamW(b1=0.5))
    assert load([], ['optimizer.final_fraction = 0.5']).optimizer == OptimizerConfig(
        schedule=Linear(final_fraction=0.5)
    )
    with pytest.raises(ConfigError, match=rf"optimizer\.schedule = 'cosin': {listed(Schedule)}"):
        load([], ["optimizer.decay = 'cosin'"])
    with pytest.raises(ConfigError, match=r'nothing uses adamw\.b1, because @adamw\(\) is not selected'):
        load([], ['optimizer.b1 = 0.5', 'optimizer.rule = @test_sign()'])


def test_every_field_has_a_help_text():
    rooms = 'lm.training.optimizer', 'lm.training.rules.', 'lm.training.schedules.'
    ours = [cls for cls in REGISTRY.values() if cls.__module__.startswith(rooms)]
    assert {OptimizerConfig, AdamW, Muon, Constant, Cosine, Linear, Wsd} <= set(ours)
    silent = {f'{cls.gin_name}.{f.name}' for cls in ours for f in dataclasses.fields(cls) if not f.metadata['help']}
    assert silent == set()
