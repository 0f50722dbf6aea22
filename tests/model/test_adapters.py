"""Low-rank adapters: beside which matrices they stand, what they compute, and what merging gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.attention.recurrent.retention import Retention
from lm.attention.softmax import Softmax
from lm.errors import ConfigError
from lm.model import ModelConfig
from lm.model.adapters import AdaptedFunctions, Lora
from lm.model.feed_forward.experts import Experts
from lm.model.functions import ModelFunctions
from lm.training.optimizer import OptimizerConfig
from lm.training.rules.muon import Muon
from lm.training.step import TrainStep

SIZES = dict(vocab_size=64, n_layers=3, d_model=32, n_heads=4, n_kv_heads=2, head_dim=8)
MODEL = ModelConfig(**SIZES, attention=(Retention(), Softmax()))
LORA = Lora(rank=2, alpha=6.0, targets=('v', 'o', 'gate', 'down', 'q'))
TOKENS_BxL = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 25)))


@functools.cache
def adapted(lora=LORA, dtype='float32'):
    return AdaptedFunctions(ModelFunctions(MODEL, jnp.dtype(dtype)), lora)


@functools.cache
def base():
    return jax.jit(ModelFunctions(MODEL, jnp.float32).init, static_argnums=0)(0)


def moved(functions, seed=3):
    """Returns adapters whose B is not zero."""
    params = functions.init(1)['params']
    keys = iter(jax.random.split(jax.random.key(seed), 100))
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(keys), x.shape), params)


def join(functions, params):
    return {'params': params, 'buffers': base()['buffers'], 'base': functions.cast(base()['params'])}


def loss(functions, weights):
    share_BxL = jnp.full((2, 24), 1 / 48)
    return functions.weighted_loss(weights, TOKENS_BxL[:, :-1], TOKENS_BxL[:, 1:], share_BxL)[0]


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_model_begins_as_its_base_to_the_bit(dtype):
    functions = adapted(LORA, dtype)
    nats = [
        jax.jit(lambda weights, one=one: one.score_targets(weights, TOKENS_BxL[:, :-1], TOKENS_BxL[:, 1:]).nats)(given)
        for one, given in (
            (functions.base, base()),
            (functions, join(functions, functions.init(1)['params'])),
        )
    ]
    np.testing.assert_array_equal(*nats)


def merge_plainly(params, whole):
    """Adds (alpha / rank) A B to each matrix, one layer and one matrix at a time."""
    sizes = {'qkv': (32, 16, 16), 'attention_out': (32,), 'glu_in': (80, 80), 'glu_out': (32,)}
    chosen = {'qkv': (0, 2), 'attention_out': (0,), 'glu_in': (1,), 'glu_out': (0,)}
    whole = jax.tree.map(np.array, whole)
    for stack, parts in params['blocks'].items():
        for part, adapter in parts.items():
            for layer in range(len(adapter['down'])):
                right = 0
                for number, place in enumerate(chosen[part]):
                    first, columns = sum(sizes[part][:place]), sizes[part][place]
                    a = adapter['down'][layer][:, 2 * number : 2 * number + 2]
                    b = adapter['up'][layer][:, right : right + columns]
                    whole['blocks'][stack][part]['kernel'][layer][:, first : first + columns] += 3.0 * (a @ b)
                    right += columns
    return whole


def test_outputs_and_gradients_are_those_of_merged_matrices():
    functions = adapted()
    params = moved(functions)
    reference = merge_plainly(params, base()['params'])
    merged = functions.merge_params(params, base()['params'])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), merged, reference)

    def through_merged(params):
        whole = functions.merge_params(params, base()['params'])
        return loss(functions.base, {'params': whole, 'buffers': base()['buffers']})

    def through_adapters(params):
        return loss(functions, join(functions, params))

    (one, ours), (other, theirs) = (
        jax.jit(jax.value_and_grad(each))(params) for each in (through_adapters, through_merged)
    )
    np.testing.assert_allclose(one, other, rtol=1e-6)
    assert abs(one - loss(functions.base, base())) > 1e-3
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(theirs))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * largest), ours, theirs)


def test_only_the_chosen_matrices_have_adapters():
    functions = adapted(Lora(rank=2, targets=('k',)))
    shapes = jax.tree.map(lambda leaf: leaf.shape, functions.abstract['params'])
    stacked = {which: {'qkv': {'down': (n, 32, 2), 'up': (n, 2, 16)}} for which, n in ((0, 1), (1, 1), (2, 1))}
    assert shapes == {'blocks': stacked}
    assert functions.count_adapters() == 3 * 2 * (32 + 16)
    params = moved(functions)
    merged = functions.merge_params(params, base()['params'])
    changed = jax.tree.map(
        lambda a, b: np.flatnonzero((a != b).any(axis=tuple(range(a.ndim - 1)))), merged, base()['params']
    )
    for stack in changed['blocks'].values():
        np.testing.assert_array_equal(stack.pop('qkv')['kernel'], np.arange(32, 48))
    assert not any(leaf.size for leaf in jax.tree.leaves(changed))


def test_a_projection_that_no_layer_has_is_refused():
    experts = ModelConfig(**SIZES, attention=Softmax(), feed_forward=Experts(n_experts=4))
    with pytest.raises(ConfigError, match=r'lora.targets: no layer of the model has up; name some of q, k, v, o$'):
        AdaptedFunctions(ModelFunctions(experts, jnp.float32), Lora(targets=('q', 'up')))
    with pytest.raises(ConfigError, match=r'lora.targets'):
        Lora(targets=('q', 'q'))


@pytest.mark.parametrize('rule', [None, Muon()], ids=['adamw', 'muon'])
def test_a_step_moves_adapters_alone_and_sums_microbatches(rule):
    options = {} if rule is None else {'rule': rule}
    optimizer = OptimizerConfig(peak_learning_rate=1e-2, warmup_steps=1, weight_decay=0.0, **options)
    functions = adapted()
    step = TrainStep(functions, optimizer, 10)
    fixed = {'base': functions.cast(base()['params'])}
    batch_BxL = jnp.asarray(np.random.default_rng(0).integers(0, 64, (4, 33)), jnp.uint16)
    train, found = jax.jit(step.train), []
    for microbatches in (1, 2):
        state, losses = step.init(1), []
        assert not {'kernel', 'embedding'} & {
            str(path[-1].key) for path, _ in jax.tree.leaves_with_path(state['params'])
        }
        for _ in range(3):
            state, metrics = train(state, batch_BxL.reshape(microbatches, -1, 33), fixed)
            losses.append(float(metrics['loss']))
        assert losses[-1] < losses[0]
        found.append(state['params'])
    assert all(jnp.abs(leaf).max() > 0 for leaf in jax.tree.leaves(found[0]))
    if rule is None:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), *found)
