"""The training step: skipped updates, gradient accumulation, sharding, and the paper's schedule."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from mechanisms_list import MECHANISMS
from tiny import train_step

from lm.attention.performer import Performer
from lm.attention.softmax import Softmax
from lm.checkpoint.snapshot import flatten
from lm.errors import ConfigError
from lm.model import ModelConfig
from lm.model.functions import count_parameters, select_final, select_weights
from lm.parameters import declarations
from lm.pod.mesh import MeshConfig, batch_sharding, make_mesh, place
from lm.training.optimizer import OptimizerConfig
from lm.training.rules.adamw import AdamW
from lm.training.step import TrainStep

MODEL = ModelConfig(vocab_size=64, n_layers=2, d_model=64, n_heads=4, head_dim=16, attention=Softmax())


def make(**optimizer) -> TrainStep:
    return train_step(MODEL, OptimizerConfig(**({'peak_learning_rate': 1e-2, 'warmup_steps': 2} | optimizer)), steps=10)


def batch(microbatches=1, rows=8, seed=0):
    return jnp.asarray(
        np.random.default_rng(seed).integers(0, 64, (microbatches, rows // microbatches, 33)), jnp.uint16
    )


@functools.cache
def plain():
    """Returns the step with default settings and its programs, for the tests that only use it."""
    step = make()
    return step, jax.jit(step.init), jax.jit(step.train)


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_the_z_loss_adds_the_squared_normalizer_to_the_gradient_alone():
    (step, init, _), held = plain(), make(z_loss=1e-2)
    state = init(0)
    tokens = batch().astype(jnp.int32)

    def by_formula(params, z_loss):
        model = step.functions.merge({'params': params, 'buffers': state['buffers']})
        logits = model(tokens[0, :, :-1])
        total = jax.nn.logsumexp(logits, axis=-1)
        nats = total - jnp.take_along_axis(logits, tokens[0, :, 1:, None], -1)[..., 0]
        return (nats + z_loss * total**2).mean(), nats.mean()

    expected = {z: jax.jit(jax.grad(functools.partial(by_formula, z_loss=z), has_aux=True)) for z in (0.0, 1e-2)}
    for one, z_loss, microbatches in ((step, 0.0, 1), (held, 1e-2, 1), (held, 1e-2, 2)):
        parts = tokens.reshape(microbatches, -1, 33)
        loss, gradients, _ = jax.jit(one._gradients)(select_weights(state), parts, 0)
        want, nats = expected[z_loss](state['params'])
        np.testing.assert_allclose(loss, nats, rtol=1e-6)
        jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=1e-6, rtol=1e-3), gradients, want)


def test_a_non_finite_step_changes_nothing_but_the_counters():
    step, init, train = plain()
    good, _ = train(init(0), batch())
    nan = train_step(MODEL, OptimizerConfig(warmup_steps=2), 10)
    nan.weighted_loss = lambda *arguments: jax.tree.map(lambda x: x * jnp.nan, step.weighted_loss(*arguments))
    spoil = jax.jit(nan.train)
    bad, metrics = spoil(good, batch(seed=1))
    for part in ('params', 'optimizer', 'buffers'):
        assert bits(bad[part]) == bits(good[part])
    assert (int(bad['step']), int(bad['skipped']), int(bad['in_a_row'])) == (2, 1, 1)
    assert not np.isfinite(metrics['loss'])
    assert step.name_first_bad(int(metrics['first_bad'])) == 'loss'
    worse, unlearned = spoil(bad, batch(seed=1))
    assert (int(worse['skipped']), int(worse['in_a_row'])) == (2, 2)
    better, metrics = train(worse, batch(seed=2))
    assert (int(better['step']), int(better['skipped']), int(better['in_a_row'])) == (4, 2, 0)
    assert np.isfinite(metrics['loss'])
    assert int(metrics['first_bad']) == -1
    # The next good update equals the update without the bad steps between.
    expected, told = train(good, batch(seed=2))
    assert bits(better['params']) == bits(expected['params'])
    # The logged learning rate, too, belongs to the second update, and not to the fourth batch.
    assert float(metrics['learning_rate']) == float(told['learning_rate']) == pytest.approx(float(step.schedule(1)))
    assert float(unlearned['learning_rate']) == pytest.approx(float(nan.schedule(1)))


def test_an_infinite_gradient_is_skipped_although_the_loss_is_finite():
    step, state = make(), plain()[1](0)
    finite = step.weighted_loss

    def weighted_loss(weights, *rest):
        loss, *others = finite(weights, *rest)
        # The gradient of sqrt is infinite at zero.
        return loss + jnp.sqrt(jnp.sum(weights['params']['final_norm']['bias'] ** 2)), *others

    step.weighted_loss = weighted_loss
    new, metrics = jax.jit(step.train)(state, batch())
    assert np.isfinite(metrics['loss'])
    assert int(new['skipped']) == 1
    assert step.name_first_bad(int(metrics['first_bad'])) == 'gradient of final_norm/bias'
    assert bits(new['params']) == bits(state['params'])


def test_a_learning_rate_that_is_not_finite_changes_nothing():
    step = make()
    step.schedule = lambda count: jnp.nan * count
    state = jax.jit(step.init)(0)
    new, metrics = jax.jit(step.train)(state, batch())
    assert (int(new['skipped']), int(new['in_a_row'])) == (1, 1)
    assert bits(new['params']) == bits(state['params'])
    assert step.name_first_bad(int(metrics['first_bad'])) == 'learning rate'


def test_a_mean_of_the_weights_changes_no_step_and_skips_with_it():
    step, (_, init, train) = make(average_steps=3), plain()
    state, usual = jax.jit(step.init)(0), init(0)
    advance, mean = jax.jit(step.train), state['params']
    for i in range(4):
        (state, _), (usual, _) = advance(state, batch(seed=i)), train(usual, batch(seed=i))
        mean = step.optimizer.average(mean, state['params'], jnp.int32(i + 1))
    for got, expected in ((state['params'], usual['params']), (state['average'], mean)):  # up to rounding
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), got, expected)
    assert bits(select_final(state)['params']) == bits(state['average']) != bits(state['params'])
    assert select_final(usual)['params'] is usual['params']
    broken = state | {'params': jax.tree.map(lambda x: x * jnp.nan, state['params'])}
    assert bits(advance(broken, batch())[0]['average']) == bits(state['average'])
    placed = place(step.abstract, make_mesh(MeshConfig(fsdp=4)), step.functions.declared)
    shardings = [jax.tree.map(lambda leaf: leaf.sharding, placed[name]) for name in ('average', 'params')]
    assert shardings[0] == shardings[1]


def test_a_number_that_an_update_would_make_infinite_keeps_its_value():
    step = make(rule=AdamW(b1=0.999), peak_learning_rate=1e30)
    good = jax.jit(step.init)(0)
    adam = good['optimizer'][1]
    mu = adam.mu | {'final_norm': adam.mu['final_norm'] | {'bias': adam.mu['final_norm']['bias'].at[3].set(3e38)}}
    extreme = good | {'optimizer': (good['optimizer'][0], adam._replace(mu=mu), *good['optimizer'][2:])}
    (new, metrics), (usual, _) = (jax.jit(step.train)(state, batch()) for state in (extreme, good))
    assert int(new['skipped']) == int(new['in_a_row']) == 0
    assert (int(metrics['first_bad']), int(metrics['kept'])) == (-1, 1)
    found, expected, before = (state['params'].pop('final_norm')['bias'] for state in (new, usual, good))
    assert found[3] == before[3] != expected[3]
    np.testing.assert_array_equal(np.delete(found, 3), np.delete(expected, 3))
    assert bits(new['params']) == bits(usual['params'])


def test_a_whole_array_without_a_finite_update_is_a_bad_step():
    """An infinite decay freezes the matrices; biases and gains are not decayed and go on."""
    step, state = make(), plain()[1](0)
    object.__setattr__(step.optimizer, 'weight_decay', math.inf)
    step.transform = step.optimizer.build(10, step.functions.declared, 1.0, step.frozen)
    new, metrics = jax.jit(step.train)(state, batch())
    assert (int(new['skipped']), int(new['in_a_row'])) == (0, 1)
    flat = {name: (old, flatten(new['params'])[name]) for name, old in flatten(state['params']).items()}
    frozen = {name: old for name, (old, now) in flat.items() if bits(old) == bits(now)}
    assert 0 < len(frozen) < len(flat)
    assert int(metrics['kept']) == sum(x.size for x in frozen.values())
    named = step.name_first_bad(int(metrics['first_bad']))
    assert named == f'update of {next(iter(frozen)).replace(".", "/")}'
    again, _ = jax.jit(step.train)(new, batch())
    assert int(again['in_a_row']) == 2


@pytest.mark.parametrize('microbatches', [2, 4])
def test_gradient_accumulation_is_the_same_step(microbatches):
    _, init, train = plain()
    whole, a = train(init(0), batch())
    parts, b = train(init(0), batch().reshape(microbatches, 8 // microbatches, 33))
    np.testing.assert_allclose(a['loss'], b['loss'], rtol=1e-5)
    np.testing.assert_allclose(a['grad_norm'], b['grad_norm'], rtol=1e-4)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-4), whole['params'], parts['params'])


@pytest.fixture(scope='module')
def single():
    """Returns the losses of three steps on one device."""
    (_, init, train), losses = plain(), []
    state = init(0)
    for seed in range(3):
        state, metrics = train(state, batch(seed=seed))
        losses.append(float(metrics['loss']))
    return losses


@pytest.mark.parametrize(('devices', 'fsdp', 'microbatches'), [(8, 1, 1), (8, 4, 1), (4, 1, 2), (4, 2, 2)])
def test_any_mesh_takes_the_same_steps(single, devices, fsdp, microbatches):
    mesh = make_mesh(MeshConfig(fsdp=fsdp), jax.devices()[:devices])
    with jax.set_mesh(mesh):
        step = make()
        abstract = place(jax.eval_shape(lambda: step.init(0)), mesh, step.functions.declared)
        shardings = jax.tree.map(lambda x: x.sharding, abstract)
        state = jax.jit(lambda: step.init(0), out_shardings=shardings)()
        if fsdp > 1:
            largest = max(jax.tree.leaves(state['params']), key=lambda x: x.size)
            assert largest.addressable_shards[0].data.size == largest.size // fsdp
        train = jax.jit(step.train, out_shardings=(shardings, None))
        for seed in range(3):
            rows = jax.device_put(batch(microbatches, seed=seed), batch_sharding(mesh, axis=1))
            state, metrics = train(state, rows)
            assert float(metrics['loss']) == pytest.approx(single[seed], abs=1e-5)


@pytest.mark.parametrize('fsdp', [1, 2])
def test_any_mesh_counts_the_same_targets(fsdp):
    def unpack(tokens_BxL):
        targets_BxL = tokens_BxL[:, 1:]
        return tokens_BxL[:, :-1], targets_BxL, targets_BxL % 3 == 0

    step = train_step(MODEL, OptimizerConfig(warmup_steps=2), 10, unpack, by_window=True)
    state, tokens = jax.jit(step.init)(0), batch(2)
    alone = jax.jit(step._gradients)(select_weights(state), tokens, 0)
    mesh = make_mesh(MeshConfig(fsdp=fsdp), jax.devices()[:4])
    with jax.set_mesh(mesh):
        rows = jax.device_put(tokens, batch_sharding(mesh, axis=1))
        found = jax.jit(step._gradients)(jax.tree.map(np.asarray, select_weights(state)), rows, 0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, alone)


def test_the_schedule_of_the_paper():
    schedule = OptimizerConfig().build_schedule(125_000)
    assert float(schedule(0)) == pytest.approx(7e-4 / 10_000, rel=1e-3)
    assert float(schedule(9_999)) == pytest.approx(7e-4)
    assert float(schedule(10_000)) == pytest.approx(7e-4)
    assert float(schedule(10_000 + 115_000 // 2)) == pytest.approx(3.5e-4)
    assert float(schedule(125_000)) == 0
    with pytest.raises(ConfigError, match=r'optimizer.warmup_steps = 10000: must be below train.steps = 100'):
        OptimizerConfig().build_schedule(100)


@pytest.mark.parametrize('attention', MECHANISMS.values(), ids=MECHANISMS.keys())
def test_weight_decay_is_as_declared(attention):
    """A step without gradients pulls every matrix towards zero, and nothing else."""
    step = train_step(dataclasses.replace(MODEL, attention=attention, n_layers=2), OptimizerConfig(warmup_steps=1), 10)
    params = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), jax.eval_shape(lambda: step.init(0))['params'])
    zeros = jax.tree.map(np.zeros_like, params)
    updates, _ = step.transform.update(zeros, step.transform.init(params), params)
    moved = jax.tree.map(lambda x: bool(np.any(x)), updates)
    kinds = jax.tree.map(lambda told: told.kind, step.functions.declared)
    assert moved == jax.tree.map(lambda kind: kind == 'matrix', kinds)
    # Axes over layers, heads and sketches aside, each parameter with two or more axes is a matrix or the embedding.
    lead = {'layer', 'heads', 'sketch', 'factor', 'rank'}
    wide = jax.tree.map(
        lambda told, x: sum(n > 1 for a, n in zip(told.axes, x.shape, strict=True) if a not in lead) > 1,
        step.functions.declared,
        params,
    )
    wide['embedding']['embedding'] = False
    assert wide == moved
    assert kinds['embedding']['embedding'] == 'embedding'
    assert kinds['blocks'][0]['glu_norm'] == {'scale': 'gain', 'bias': 'bias'}


@pytest.mark.parametrize('fsdp', [4, 8])
def test_optimizer_state_is_sharded_like_its_parameter_and_layers_are_not_split(fsdp):
    mesh = make_mesh(MeshConfig(fsdp=fsdp), jax.devices()[:8])
    step = train_step(dataclasses.replace(MODEL, n_layers=256, d_model=16), OptimizerConfig(warmup_steps=1), 10)
    state = place(jax.eval_shape(lambda: step.init(0)), mesh, step.functions.declared)
    specs = jax.tree.map(lambda x: tuple(x.sharding.spec), state['params'])
    assert state['params']['blocks'][0]['glu_out']['kernel'].shape == (256, 40, 16)
    assert specs['blocks'][0]['glu_out']['kernel'] == (None, 'fsdp')
    moments = optax.tree_utils.tree_get(state['optimizer'], 'mu')
    assert jax.tree.map(lambda x: tuple(x.sharding.spec), moments) == specs


def test_a_parameter_must_be_declared():
    with pytest.raises(ValueError, match=r'kernel: of shape \(2, 3\)'):
        declarations(nnx.Linear(2, 3, use_bias=False, rngs=nnx.Rngs(0)))


@pytest.fixture
def linear() -> tuple[TrainStep, dict]:
    """Returns a step with one parameter, whose loss is a simple sum, and its state; it compiles at once."""
    step = make()

    def weighted_loss(weights, tokens_BxL, targets_BxL, share_BxL):
        losses_BxL = weights['params']['w'] * (weights['buffers']['b'] * tokens_BxL + 100.0 * targets_BxL)
        return (share_BxL * losses_BxL).sum(), losses_BxL, {}

    step.weighted_loss = weighted_loss
    step.transform = optax.sgd(2.0**-10)
    zero = jnp.zeros((), jnp.int32)
    params = {'w': jnp.float32(1)}
    state = {'params': params, 'buffers': {'b': jnp.float32(0.25)}, 'optimizer': step.transform.init(params)}
    return step, state | dict.fromkeys(('step', 'skipped', 'in_a_row'), zero)


@pytest.mark.parametrize('microbatches', [1, 2, 4])
def test_the_loss_is_the_mean_over_targets_one_ahead_and_the_update_goes_down(linear, microbatches):
    step, state = linear
    tokens = np.asarray(batch(microbatches), np.float64)
    expected = (0.25 * tokens[..., :-1] + 100 * tokens[..., 1:]).mean()
    new, metrics = step.train(state, batch(microbatches))
    assert float(metrics['loss']) == pytest.approx(expected, rel=1e-6)
    assert float(metrics['grad_norm']) == pytest.approx(expected, rel=1e-6)  # the loss is w times it
    assert float(new['params']['w']) == pytest.approx(1 - expected / 1024, rel=1e-6)
    assert float(new['buffers']['b']) == 0.25
    step.unpack = lambda tokens_BxL: (tokens_BxL[:, :-1], tokens_BxL[:, 1:], tokens_BxL[:, 1:] < 10)
    _, metrics = step.train(state, batch(1))
    is_scored = np.asarray(batch(1))[0, :, 1:] < 10
    tokens = np.asarray(batch(1), np.float64)[0]
    assert float(metrics['loss']) == pytest.approx(
        (0.25 * tokens[:, :-1] + 100 * tokens[:, 1:])[is_scored].mean(), rel=1e-6
    )


def test_a_single_microbatch_needs_no_loop(linear):
    step, state = linear
    assert [' scan[' in str(jax.make_jaxpr(step.train)(state, batch(n))) for n in (1, 2)] == [False, True]


def test_values_that_are_not_finite_are_named_in_the_order_of_causes():
    step = make()
    n = len(jax.tree.leaves(step.functions.declared))
    names = [step.name_first_bad(i) for i in (0, 1, n, n + 1, n + 2)]
    assert (names[0], *names[3:]) == ('loss', 'gradient norm', 'learning rate')
    assert [name.rpartition(' ')[0] for name in names[1:3]] == ['gradient of'] * 2


class Drawing(Softmax):
    """Softmax with pretended projections, which are redrawn every `every` steps."""

    def __init__(self, every):
        super().__init__()
        object.__setattr__(self, 'redraw_every', every)


def test_mechanisms_are_redrawn_at_their_intervals():
    functions = make().functions
    functions.config = dataclasses.replace(MODEL, attention=(Drawing(None), Drawing(4), Drawing(6)), n_layers=3)
    assert [functions.choose_redrawn(done) for done in (0, 1, 3, 4, 6, 8, 12)] == [
        (),
        (),
        (),
        (1,),
        (2,),
        (1,),
        (1, 2),
    ]


def test_projections_depend_on_seed_and_step_alone():
    performer = Performer(n_features=4, redraw_every=7)
    model = dataclasses.replace(MODEL, attention=performer, n_layers=1, d_model=16, n_heads=1)
    step = train_step(model, OptimizerConfig(warmup_steps=1), 10)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(lambda: select_weights(step.init(0))))
    drawn = [bits(step.functions.redraw(zeros, (0,), *numbers)) for numbers in ((0, 7), (0, 7), (0, 14), (1, 7))]
    assert drawn[0] == drawn[1]
    assert bits(zeros['buffers']) != drawn[0] != drawn[2] != drawn[3] != drawn[0]
    assert bits(step.functions.redraw(zeros, (), 0, 7)) == bits(zeros['buffers'])


def test_parameters_are_counted_by_part():
    counts = count_parameters(MODEL)
    assert counts['embedding'] == 64 * 64
    assert counts['attention'] == 2 * 4 * 64 * 64
    assert counts['mechanism'] == 0
    assert sum(counts.values()) == sum(
        x.size for x in jax.tree.leaves(jax.eval_shape(lambda: make().init(0))['params'])
    )
