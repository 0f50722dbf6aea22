"""Distillation: student and teacher in one step, what is taken from the teacher, and what stays as it is."""

import dataclasses
import functools

import grids
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import train_step

from lm.attention.hedgehog import Hedgehog
from lm.attention.performer import Performer
from lm.attention.recurrent.retention import Retention
from lm.attention.softmax import Softmax
from lm.errors import ConfigError
from lm.model import ModelConfig
from lm.model.distillation import compare_layers, find_most_probable
from lm.model.feed_forward.experts import Experts
from lm.model.functions import ModelFunctions, over_windows
from lm.model.key_heads import clone_key_heads, unshare_key_heads
from lm.model.layers import copy_layers, find_copied, find_misfits, find_same_layers
from lm.pod.mesh import MeshConfig, batch_sharding, make_mesh, place
from lm.training.objectives.align import Align
from lm.training.objectives.distill import Distill
from lm.training.objectives.distillation import Pair
from lm.training.optimizer import OptimizerConfig
from lm.training.rules.adamw import AdamW
from lm.training.step import Teaching

SIZES = dict(vocab_size=64, n_layers=4, d_model=32, n_heads=2, head_dim=16)
TEACHER = ModelConfig(**SIZES, attention=Softmax())
STUDENT = ModelConfig(**SIZES, attention=(Retention(), Softmax()))
CHANGED = ('qkv', 'attention', 'attention_out')
NEW = ModelConfig(**SIZES, attention=Hedgehog())


def batch(microbatches=1, rows=8, length=33):
    draws = np.random.default_rng(0).integers(0, 64, (microbatches, rows // microbatches, length))
    return jnp.asarray(draws, jnp.uint16)


@functools.cache
def functions(config):
    return ModelFunctions(config, jnp.dtype('float32'))


@functools.cache
def weights(config, seed=0):
    return functions(config).init(seed)


def make(objective, student=STUDENT, **optimizer):
    options = {'peak_learning_rate': 1e-2, 'warmup_steps': 2} | optimizer
    teaching = Teaching(objective, functions(TEACHER))
    return train_step(student, OptimizerConfig(**options), 10, teaching=teaching)


def start(step, student=STUDENT):
    """Returns the state of a student that begins with the weights of the teacher, and these."""
    state, teacher = step.init(1), weights(TEACHER)
    state['params'] = copy_layers(functions(TEACHER), functions(student), teacher['params'], state['params'])
    return state, teacher


def layer_errors(ours, params, tokens_BxL):
    models = [(functions(ours), {'params': params, 'buffers': weights(ours)['buffers']})]
    models += [(functions(TEACHER), weights(TEACHER))]
    return over_windows(compare_layers, models, None, tokens_BxL)


def test_a_model_has_no_error_as_its_own_teacher():
    tokens_BxL = batch()[0, :, :-1].astype(jnp.int32)
    errors_BxLxN, sizes_BxLxN = layer_errors(TEACHER, weights(TEACHER)['params'], tokens_BxL)
    assert errors_BxLxN.shape == (8, 32, 4)
    assert not errors_BxLxN.any()
    assert (sizes_BxLxN > 0).all()


@pytest.mark.parametrize('student', [STUDENT, NEW], ids=['pattern', 'one'])
def test_no_gradient_crosses_layers(student):
    tokens_BxL = batch()[0, :, :-1].astype(jnp.int32)

    def error(params, layer):
        errors_BxLxN, _ = layer_errors(student, params, tokens_BxL)
        return errors_BxLxN[..., layer].sum()

    gradient = jax.jit(jax.grad(error), static_argnums=1)
    params, period = weights(student, 1)['params'], len(student.pattern)
    for layer in (0, 3):
        found = gradient(params, layer)
        outside = {name: value for name, value in found.items() if name != 'blocks'}
        assert not any(leaf.any() for leaf in jax.tree.leaves(outside))
        for stack, value in found['blocks'].items():
            for i in range(4 // period):
                norms = {name: float(jnp.abs(leaf[i]).max()) for name, leaf in value['qkv'].items()}
                assert all((norm > 0) == (stack + i * period == layer) for norm in norms.values())
            assert not any(leaf.any() for name in ('glu_in', 'attention_norm') for leaf in value[name].values())


def test_the_error_of_a_layer_is_the_difference_of_the_outputs_of_attention():
    tokens_BxL, ours = batch()[0, :2, :-1].astype(jnp.int32), weights(NEW, 1)
    errors_BxLxN, _ = layer_errors(NEW, ours['params'], tokens_BxL)
    student, teacher = functions(NEW).merge(ours), functions(TEACHER).merge(weights(TEACHER))
    positions = jnp.arange(32)
    x_BxLxD = teacher.embed(tokens_BxL, positions)
    (rotation,), (other,) = teacher.rotate_positions(positions), student.rotate_positions(positions)
    for i in range(4):
        block, learner = teacher.layer(i), student.layer(i)
        normed_BxLxD = block.normalize(x_BxLxD)
        difference_BxLxD = learner.mix(normed_BxLxD, other) - block.mix(normed_BxLxD, rotation)
        np.testing.assert_allclose(errors_BxLxN[..., i], (difference_BxLxD**2).mean(-1), rtol=1e-4, atol=1e-7)
        x_BxLxD = block(x_BxLxD, rotation)


def test_a_student_takes_each_layer_from_the_same_layer_of_its_teacher():
    copied = find_copied(functions(TEACHER), functions(STUDENT))
    assert copied['blocks'][0].pop('attention') == {'out_norm': {'scale': False}}, 'softmax has no such norm'
    assert all(jax.tree.leaves(copied))
    theirs = weights(TEACHER)['params']
    taken = copy_layers(functions(TEACHER), functions(STUDENT), theirs, weights(STUDENT, 1)['params'])
    for stack in (0, 1):
        for name in ('qkv', 'glu_out'):
            np.testing.assert_array_equal(
                taken['blocks'][stack][name]['kernel'], theirs['blocks'][0][name]['kernel'][stack::2]
            )
    np.testing.assert_array_equal(taken['embedding']['embedding'], theirs['embedding']['embedding'])
    others = find_copied(functions(TEACHER), functions(NEW))
    own = {name for name, is_copied in others['blocks'][0]['attention'].items() if not is_copied}
    assert own == {'q_weight', 'k_weight'}


def test_a_student_takes_the_projections_of_its_own_mechanism_and_the_corrections_of_experts():
    def both(attention):
        config = ModelConfig(**SIZES, attention=attention, feed_forward=Experts(n_experts=4, correction=True))
        return functions(config), weights(config, 3)['buffers']

    performer = Performer(n_features=8)
    (source, theirs), (taking, _) = both(performer), both((Softmax(), performer))
    theirs = jax.tree.map(lambda leaf: leaf + 1.0, theirs)
    ours = taking.init(5)['buffers']
    taken = copy_layers(source, taking, theirs, ours, kind='buffers')
    for stack in (0, 1):
        corrections = taken['blocks'][stack]['experts']['correction']
        np.testing.assert_array_equal(corrections, theirs['blocks'][0]['experts']['correction'][stack::2])
    projections = taken['blocks'][1]['attention']['projection']
    np.testing.assert_array_equal(projections, theirs['blocks'][0]['attention']['projection'][1::2])
    others, found = both(Softmax())[0], find_copied(both(Softmax())[0], taking, kind='buffers')
    assert others.abstract['buffers']['blocks'][0].keys() == {'experts'}
    assert not found['blocks'][1]['attention']['projection']
    assert found['blocks'][1]['experts']['correction']


def test_a_layer_with_other_options_is_another_layer():
    same = find_same_layers(functions(TEACHER), functions(STUDENT))
    assert same == {1}
    for options in ({'rotary_base': None}, {'key_offset': 0.5}):
        changed = ModelConfig(**SIZES, attention=(Retention(), Softmax()), **options)
        assert find_same_layers(functions(TEACHER), functions(changed)) == set()


def test_sizes_that_do_not_fit_are_found():
    assert find_misfits(functions(TEACHER), functions(STUDENT)) == []
    wide = ModelConfig(**SIZES | {'vocab_size': 96}, attention=(Retention(), Softmax()))
    assert find_misfits(functions(TEACHER), functions(wide)) == [('embedding.embedding', (64, 32), (96, 32))]


def test_alignment_moves_attention_alone_and_keeps_the_layers_of_the_teacher():
    step = make(Align(teacher='t'))
    state, teacher = start(step)
    new, metrics = jax.jit(step.train)(state, batch(), {'teacher': teacher})
    old = state['params']
    assert metrics['layer_errors'].shape == (4,)
    assert not metrics['layer_errors'][1::2].any(), 'these layers are the teacher’s'
    assert (metrics['layer_errors'][::2] > 0).all()
    np.testing.assert_allclose(metrics['loss'], metrics['layer_errors'].sum(), rtol=1e-6)
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), old, new['params'])
    assert moved['blocks'][0]['qkv']['kernel']
    assert moved['blocks'][0]['attention_out']['kernel']
    moved['blocks'][0] = {n: v for n, v in moved['blocks'][0].items() if n not in CHANGED}
    assert not any(jax.tree.leaves(moved))
    measures, _ = step.read_measures(jax.tree.map(np.ndarray.tolist, jax.device_get(metrics)))
    assert list(measures) == [f'layer_error/{i:02d}' for i in range(4)]
    assert measures['layer_error/01'] == 0 < measures['layer_error/00']


def test_new_parameters_alone_can_learn():
    step = make(Align(teacher='t', trains='new'), NEW)
    state, teacher = start(step, NEW)
    new, _ = jax.jit(step.train)(state, batch(), {'teacher': teacher})
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), state['params'], new['params'])
    assert moved['blocks'][0].pop('attention') == {'q_weight': True, 'k_weight': True}
    assert not any(jax.tree.leaves(moved))


def test_alignment_lowers_the_error_of_each_layer():
    step = make(Align(teacher='t'), NEW, peak_learning_rate=3e-3, weight_decay=0.0)
    state, teacher = start(step, NEW)
    advance, errors = jax.jit(step.train), []
    for _ in range(10):
        state, metrics = advance(state, batch(), {'teacher': teacher})
        errors.append(metrics['layer_errors'])
    assert (errors[-1] < 0.9 * errors[0]).all()


def test_predictions_are_compared_as_by_formula():
    step = make(Distill(teacher='t', temperature=2.0, cross_entropy=0.25))
    state, teacher = start(step)
    tokens = batch()[0].astype(jnp.int32)
    _, metrics = jax.jit(step.train)(state, batch(), {'teacher': teacher})
    ours, theirs = (
        jax.nn.log_softmax(functions(config).merge(w)(tokens[:, :-1]) / 2.0)
        for config, w in ((STUDENT, {'params': state['params'], 'buffers': state['buffers']}), (TEACHER, teacher))
    )
    divergence = 4 * (jnp.exp(theirs) * (theirs - ours)).sum(-1).mean()
    np.testing.assert_allclose(metrics['divergence'], divergence, rtol=1e-4)
    for name, config, w in (('cross_entropy', STUDENT, state), ('teacher_cross_entropy', TEACHER, teacher)):
        scored = functions(config).score_targets(w, tokens[:, :-1], tokens[:, 1:])
        np.testing.assert_allclose(metrics[name], scored.nats.mean(), rtol=1e-6)
    expected = 0.75 * metrics['divergence'] + 0.25 * metrics['cross_entropy']
    np.testing.assert_allclose(metrics['loss'], expected, rtol=1e-6)


def test_a_teacher_has_nothing_to_teach_itself():
    step = make(Distill(teacher='t'), TEACHER)
    state, teacher = start(step, TEACHER)
    _, metrics = jax.jit(step.train)(state, batch(), {'teacher': teacher})
    assert abs(metrics['divergence']) < 1e-6
    assert metrics['grad_norm'] < 1e-5


SHARED = ModelConfig(**SIZES, attention=(Softmax(), Softmax(n_kv_heads=None)), n_kv_heads=1)


@pytest.mark.parametrize('options', [{}, {'qk_norm': True, 'qk_norm_span': 'projection', 'qkv_biases': True}])
def test_cloned_key_heads_compute_what_shared_heads_do(options):
    shared = functions(dataclasses.replace(SHARED, **options))
    given = weights(shared.config)
    given = given | {'params': jax.tree.map(lambda x: x + 0.1 * jnp.arange(x.shape[-1]) / x.shape[-1], given['params'])}
    whole = unshare_key_heads(shared)
    cloned = clone_key_heads(shared, given)
    assert [whole.config.resolve(one).heads.keys for one in whole.config.layers] == [2, 2, 2, 2]
    assert jax.tree.map(jnp.shape, cloned['params']) == jax.tree.map(jnp.shape, whole.abstract['params'])
    tokens_BxL = batch()[0, :2, :-1].astype(jnp.int32)
    logits = [model.merge(w)(tokens_BxL) for model, w in ((shared, given), (whole, cloned))]
    np.testing.assert_allclose(*logits, atol=1e-4)


def test_a_student_with_other_heads_is_refused_in_one_line():
    teacher, student = functions(ModelConfig(**SIZES, n_kv_heads=1, attention=Softmax())), functions(NEW)
    with pytest.raises(ConfigError, match=r'n_kv_heads = 1, or align.clone_key_heads = True') as error:
        Align(teacher='t').check(student, teacher)
    assert '\n' not in str(error.value)
    objective = Align(teacher='t', clone_key_heads=True)
    objective.check(student, teacher)
    copied = find_copied(objective.find_source(teacher), student)
    assert copied['blocks'][0]['qkv']['kernel']
    with pytest.raises(ConfigError, match=r'the teacher has 2 heads of queries and 1 of keys; .*n_kv_heads = None'):
        objective.check(teacher, teacher)


@pytest.mark.parametrize('objective', [Align(teacher='t'), Distill(teacher='t')], ids=['align', 'distill'])
@pytest.mark.parametrize(
    ('devices', 'fsdp', 'sequence', 'microbatches'), grids.draw([(2, 1, 1, 2), (4, 2, 1, 1), (4, 1, 2, 1)], 1)
)
def test_any_mesh_takes_the_same_step(objective, devices, fsdp, sequence, microbatches):
    step = make(objective, rule=AdamW(epsilon=1e-2))  # so that no sign of a small number decides
    state, teacher = start(step)
    alone, expected = jax.jit(step.train)(state, batch(), {'teacher': teacher})
    mesh = make_mesh(MeshConfig(fsdp=fsdp, sequence=sequence), jax.devices()[:devices])
    with jax.set_mesh(mesh):
        placed = jax.device_put(
            state, jax.tree.map(lambda x: x.sharding, place(step.abstract, mesh, functions(STUDENT).declared))
        )
        theirs = place(step.fixed, mesh, functions(TEACHER).declared)
        taught = jax.device_put({'teacher': teacher}, jax.tree.map(lambda x: x.sharding, theirs))
        rows = jax.device_put(batch(microbatches), batch_sharding(mesh, axis=1))
        new, metrics = jax.jit(step.train)(placed, rows, taught)
    for name in expected:
        if name != 'first_bad':
            np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-5, atol=1e-7, err_msg=name)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), new['params'], alone['params'])


def test_frozen_parts_stay_and_have_no_optimizer_state():
    step = train_step(TEACHER, OptimizerConfig(warmup_steps=2, frozen=('embedding', 'glu')), 10)
    state = step.init(0)
    new, metrics = jax.jit(step.train)(state, batch())
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), state['params'], new['params'])
    assert not any(jax.tree.leaves(moved.pop('embedding')))
    assert not any(jax.tree.leaves([moved['blocks'][0].pop(name) for name in ('glu_in', 'glu_out')]))
    assert all(jax.tree.leaves(moved))
    sizes = sum(leaf.size for leaf in jax.tree.leaves(state['params']['embedding']))
    whole = make_state_size(OptimizerConfig(warmup_steps=2))
    assert make_state_size(OptimizerConfig(warmup_steps=2, frozen=('embedding',))) == whole - 2 * sizes
    assert metrics['grad_norm'] > 0


def make_state_size(optimizer):
    return sum(leaf.size for leaf in jax.tree.leaves(train_step(TEACHER, optimizer, 10).abstract['optimizer']))


def predict(k, tokens_BxL):
    """Returns the predictions of the teacher, as the token store keeps them."""
    models = [(functions(TEACHER), weights(TEACHER))]
    ids, logs = over_windows(functools.partial(find_most_probable, k=k), models, None, tokens_BxL)
    return {'ids': ids, 'logs': logs}


@pytest.mark.parametrize('k', [4, 64])
def test_cached_predictions_compare_outcomes_and_one_bucket(k):
    """The divergence is the plain one over k tokens and the rest; with all tokens it is the one of the teacher."""
    tokens_BxL = batch()[0].astype(jnp.int32)
    taught = predict(k, tokens_BxL[:, :-1])
    objective, student = Distill(teacher='t', top_k=k), weights(NEW, 1)
    windows = None, tokens_BxL[:, :-1], tokens_BxL[:, 1:]
    found, measures = objective.compare_with_cached(functions(NEW), student, *windows, taught)
    logits = [functions(each).merge(w)(tokens_BxL[:, :-1]) for each, w in ((NEW, student), (TEACHER, weights(TEACHER)))]
    q, p = (np.asarray(jax.nn.softmax(z), np.float64) for z in logits)
    order = np.argsort(-p, axis=-1)[..., :k]
    np.testing.assert_array_equal(np.sort(taught['ids']), np.sort(order))
    kept = [np.take_along_axis(x, order, axis=-1) for x in (p, q)]
    rest = [np.maximum(1 - x.sum(-1, keepdims=True), 1e-300) for x in kept]
    p_all, q_all = (np.concatenate(pair, axis=-1) for pair in zip(kept, rest, strict=True))
    plain = (p_all * np.log(p_all / q_all))[..., : k + (k < 64)].sum(-1)
    np.testing.assert_allclose(found, plain, atol=2e-5)
    pair = Pair(functions(NEW), student, functions(TEACHER), weights(TEACHER))
    whole, others = Distill(teacher='t').compare(pair, *windows)
    assert (np.asarray(found) <= np.asarray(whole) + 1e-5).all()
    np.testing.assert_allclose(measures['cross_entropy'], others['cross_entropy'], rtol=1e-6)
    if k == 64:
        np.testing.assert_allclose(found, whole, atol=1e-5)


def test_a_step_learns_from_cached_predictions_as_from_the_teacher():
    tokens = batch(2)
    taught = jax.tree.map(
        lambda *rows: jnp.stack(rows), *(predict(64, each[:, :-1].astype(jnp.int32)) for each in tokens)
    )
    found = []
    for top_k in (None, 64):
        step = make(Distill(teacher='t', top_k=top_k), TEACHER, peak_learning_rate=1e-3)
        state = step.init(3)
        given = (tokens, {'teacher': weights(TEACHER)}) if top_k is None else ({'tokens': tokens, **taught},)
        assert bool(step.fixed) == (top_k is None)
        _, metrics = jax.jit(step.train)(state, *given)
        found.append({name: float(metrics[name]) for name in ('loss', 'grad_norm', 'divergence')})
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_cached_predictions_have_one_temperature_and_fit_the_vocabulary():
    with pytest.raises(ConfigError, match=r'leave it out, or distill\.top_k'):
        Distill(teacher='t', top_k=2, temperature=2.0)
    with pytest.raises(ConfigError, match=r'distill\.top_k = 65: the teacher has 64 tokens'):
        Distill(teacher='t', top_k=65).check(functions(NEW), functions(TEACHER))
