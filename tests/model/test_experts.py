"""A mixture of experts: what the router chooses, no leak, decoding, sharding, the balance loss and the counts."""

import dataclasses

import grids
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experts_one_by_one import apply_experts_one_by_one
from flax import nnx

from lm import model as model_lib
from lm.attention.recurrent.delta import Delta
from lm.attention.softmax import Softmax
from lm.config.text import dump
from lm.data.dataset import DataConfig
from lm.errors import ConfigError
from lm.experiment import Experiment, load
from lm.interop.names import from_tensors, to_tensors
from lm.model import ModelConfig
from lm.model.feed_forward import DenseLayer
from lm.model.feed_forward.experts import Experts, RoutedExperts, attach_loss
from lm.model.functions import ModelFunctions, count_parameters
from lm.ops.documents import Documents
from lm.parameters import declarations
from lm.plan import plan_step
from lm.pod.mesh import MeshShape
from lm.training.config import TrainConfig
from lm.training.inputs import check_training
from lm.training.objectives.align import Align
from lm.training.optimizer import OptimizerConfig

TINY = dict(vocab_size=61, n_layers=2, d_model=32, n_heads=4, head_dim=8, hidden_dim=48)
QWEN = Experts(n_experts=6, top_k=2, hidden_dim=16, shared_dim=24, shared_gate=True)
KIMI = Experts(
    n_experts=8, top_k=3, hidden_dim=16, shared_dim=16, sigmoid=True, scale=2.5, groups=4, top_groups=2,
    correction=True,
)  # fmt: skip
SWITCH = Experts(n_experts=4, top_k=1, hidden_dim=16, normalize=False)
FORMS = {'plain': Experts(n_experts=4), 'Switch': SWITCH, 'Qwen3-Next': QWEN, 'Kimi Linear': KIMI}


def functions_of(feed_forward, **changes) -> ModelFunctions:
    return ModelFunctions(ModelConfig(**TINY | {'feed_forward': feed_forward} | changes), jnp.float32)


def draw_weights(functions: ModelFunctions):
    """Returns weights whose routers decide clearly, and whose corrections are not 0."""

    def change(path, x):
        name = jax.tree_util.keystr(path)
        if 'correction' in name:
            return jnp.asarray(np.random.default_rng(1).normal(size=x.shape), x.dtype) * 0.1
        return x * 3 if 'router' in name else x

    return jax.tree_util.tree_map_with_path(change, jax.jit(functions.init)(3))


def tokens(length: int = 24) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 61, (2, length))


@nnx.jit
def logits(model, tokens):
    return model(tokens)


def layer_of(config: Experts) -> RoutedExperts:
    shape = ModelConfig(**TINY, feed_forward=config, activation='silu').feed_forward_shape
    return RoutedExperts(config, shape, nnx.Rngs(0), jnp.float32)


@pytest.mark.parametrize('form', FORMS)
def test_a_layer_is_the_weighted_sum_of_its_experts(form):
    """The choice is computed here expert by expert, in NumPy."""
    config = FORMS[form]
    layer, x = layer_of(config), np.random.default_rng(2).normal(size=(2, 9, 32)).astype(np.float32)
    if layer.correction is not None:
        layer.correction[...] = jnp.asarray(np.random.default_rng(1).normal(size=8), jnp.float32) * 0.1
    products = x.reshape(-1, 32) @ np.asarray(layer.router.kernel[...])
    scores = np.asarray((jax.nn.sigmoid if config.sigmoid else jax.nn.softmax)(products))
    chosen = []
    for one in scores + (0 if layer.correction is None else np.asarray(layer.correction[...])):
        groups = one.reshape(config.groups, -1)
        best = np.argsort(-np.sort(groups)[:, -2:].sum(-1))[: config.top_groups]
        allowed = np.repeat(np.isin(np.arange(config.groups), best), groups.shape[1])
        chosen.append(np.argsort(-np.where(allowed, one, -np.inf))[: config.top_k])
    weights = np.take_along_axis(scores, np.array(chosen), -1)
    weights = config.scale * (weights / weights.sum(-1, keepdims=True) if config.normalize else weights)
    matrices = layer.glu_in[...], layer.glu_out[...]
    expected = apply_experts_one_by_one(
        jnp.asarray(x.reshape(-1, 32)), jnp.array(chosen), jnp.asarray(weights), *matrices, layer.shape.activate
    )
    dense = jnp.ones((2, 9, 32)) if config.shared_dim else None
    found, routing = layer.compute(jnp.asarray(x), dense)
    found = found.reshape(-1, 32)
    if dense is not None:
        gate = layer.shared_gate
        expected += 1 if gate is None else jax.nn.sigmoid(x.reshape(-1, 32) @ np.asarray(gate.kernel[...]))
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)
    counts = np.bincount(np.ravel(chosen), minlength=config.n_experts)
    np.testing.assert_allclose(routing.load_E, counts / 18, rtol=1e-6)
    np.testing.assert_allclose(routing.score_E, (scores / scores.sum(-1, keepdims=True)).mean(0), rtol=1e-5)


@pytest.mark.parametrize('form', FORMS)
def test_a_token_changes_nothing_before_it_and_decoding_equals_training(form):
    functions = functions_of(FORMS[form])
    model = functions.merge(draw_weights(functions))
    whole, changed = tokens(), tokens()
    changed[:, 15] += 1
    ours = logits(model, whole)
    np.testing.assert_array_equal(ours[:, :15], logits(model, changed % 61)[:, :15])
    graph, arrays = nnx.split(model)
    step = jax.jit(lambda arrays, *arguments: nnx.merge(graph, arrays).decode_step(*arguments))
    state, parts = model.init_state(2, 24), []
    for start, end in ((0, 12), (12, 13), (13, 24)):
        state, part = step(arrays, state, whole[:, start:end], jnp.int32(start))
        parts.append(part)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), ours, rtol=0, atol=1e-5 * np.abs(ours).max())


def test_documents_do_not_see_each_other():
    functions = functions_of(QWEN)
    weights = draw_weights(functions)
    windows = tokens()
    windows[:, 10] = 0  # ends a document
    changed = windows.copy()
    changed[:, :9] = (changed[:, :9] + 1) % 60 + 1
    windows[:, :9] = windows[:, :9] % 60 + 1
    losses = [
        functions.score_targets(weights, each[:, :-1], each[:, 1:], Documents(0)).nats for each in (windows, changed)
    ]
    assert not np.array_equal(losses[0][:, :9], losses[1][:, :9])
    np.testing.assert_array_equal(losses[0][:, 11:], losses[1][:, 11:])


def test_a_gin_file_lists_kinds_of_layers():
    lines = ['model.n_layers = 5', 'model.attention = [@delta(), @softmax()]']
    lines += ['model.feed_forward = [@dense(), @experts(), @experts()]', 'experts.n_experts = 16', 'experts.top_k = 4']
    experiment = load([], lines)
    model = experiment.model
    assert [type(model.find_feed_forward(i)) for i in range(5)] == [DenseLayer, Experts, Experts, DenseLayer, Experts]
    assert [one.gin_name for one in model.layers] == ['delta', 'softmax', 'delta', 'softmax', 'delta']
    assert load([], dump(experiment).splitlines()[2:]).model == model
    assert 'feed_forward' not in dump(Experiment())


@pytest.mark.parametrize('layers', grids.draw([3, 6, 7], 1))
def test_two_lists_repeat_together_and_the_last_repeat_may_be_cut(layers):
    pattern = Delta(gate=True), Softmax(), Delta(gate=True)
    functions = functions_of((DenseLayer(), Experts(n_experts=4)), attention=pattern, n_layers=layers)
    model = functions.merge(draw_weights(functions))
    assert [model.layer(i).experts is not None for i in range(layers)] == [i % 2 == 1 for i in range(layers)]
    assert len(functions.config.stacks) == {3: 3, 6: 6, 7: 7}[layers]
    assert logits(model, tokens(8)).shape == (2, 8, 61)
    weights = {'params': functions.abstract['params'], 'buffers': functions.abstract['buffers']}
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), weights)
    tensors = to_tensors(zeros)
    assert {name.split('.')[1] for name in tensors if 'experts' in name} == {str(i) for i in range(1, layers, 2)}
    from_tensors(tensors, functions.abstract, 'export')


def test_parameters_products_and_idle_parameters_are_counted():
    config, plain = functions_of(QWEN).config, functions_of(DenseLayer()).config
    counts = count_parameters(config)
    expert = 3 * 32 * 16
    assert counts['glu'] == 2 * (6 * expert + 3 * 32 * 24 + 32 * 6 + 32)
    assert {k: v for k, v in counts.items() if k != 'glu'} == {
        k: v for k, v in count_parameters(plain).items() if k != 'glu'
    }
    assert config.idle_parameters == 2 * 4 * expert
    assert config.feed_forward_products == counts['glu'] - config.idle_parameters
    difference = config.flops_per_token(64) - plain.flops_per_token(64)
    assert difference == 6 * (config.feed_forward_products - 2 * 3 * 32 * 48)
    assert Experts(top_k=4).expert_dim(plain.feed_forward_shape) == 8


def test_matrices_of_experts_are_decayed_and_corrections_are_not_trained():
    model = nnx.eval_shape(lambda: model_lib.build(functions_of(KIMI).config, 0))
    told = jax.tree_util.tree_leaves_with_path(declarations(model)['blocks'][0]['experts'])
    assert all(one.decayed for _, one in told)
    assert {one.axes for _, one in told} >= {('layer', 'experts', 'embed', 'mlp'), ('layer', 'experts', 'mlp', 'embed')}
    assert functions_of(KIMI).abstract['buffers']['blocks'][0]['experts']['correction'].shape == (2, 8)


def test_the_balance_loss_adds_its_gradient_and_no_loss():
    """The gradient equals the gradient of the loss as written: α Σ_e f_e P_e of each layer."""
    x = jnp.asarray(np.random.default_rng(2).normal(size=(2, 9, 32)), jnp.float32)
    balanced = dataclasses.replace(KIMI, balance=0.3)
    graph, state = nnx.split(layer_of(KIMI))
    other, _ = nnx.split(layer_of(balanced))

    def loss(state, graph, coefficient):
        layer = nnx.merge(graph, state)
        chosen, _ = layer.route(x)
        scores = jax.nn.sigmoid(x @ layer.router.kernel[...])
        share = jax.nn.one_hot(chosen, 8).mean((0, 1, 2)) * 8
        penalty = (share * (scores / scores.sum(-1, keepdims=True)).mean((0, 1))).sum()
        return jnp.square(layer(x, None)).sum() + coefficient * penalty

    found, expected = jax.value_and_grad(loss)(state, other, 0.0), jax.value_and_grad(loss)(state, graph, 0.3)
    plain = jax.value_and_grad(loss)(state, graph, 0.0)
    assert float(found[0]) == pytest.approx(float(plain[0]))
    for ours, theirs in zip(jax.tree.leaves(found[1]), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * max(1e-6, np.abs(theirs).max()))
    routers = [one[1]['router']['kernel'][...] for one in (found, plain)]
    assert not np.allclose(*routers, rtol=1e-3)
    assert jax.grad(lambda x: attach_loss(x, 3 * x))(2.0) == 4.0


def test_the_balance_loss_makes_the_choices_more_even():
    """Nothing else has a gradient here; the first router prefers one expert."""
    x = jnp.asarray(np.random.default_rng(2).normal(size=(4, 64, 32)) + 0.5, jnp.float32)
    graph, state = nnx.split(layer_of(Experts(n_experts=8, balance=1.0)))
    state['router']['kernel'][...] += jnp.eye(32, 8, k=5) * 2

    def choose(state):
        return nnx.merge(graph, state).route(x)

    def count(state):
        return np.bincount(np.asarray(choose(state)[0]).reshape(-1), minlength=8)

    before, slope = count(state), jax.jit(jax.grad(lambda state: 0 * choose(state)[1].sum()))
    for _ in range(60):
        state = jax.tree.map(lambda x, d: x - 1.0 * d, state, slope(state))
    assert count(state).std() < 0.5 * before.std(), (before, count(state))


def slope_of_router(config: Experts) -> float:
    """Returns the size of the router's gradient, relative to the gradient of the experts' matrices."""
    x = jnp.asarray(np.random.default_rng(2).normal(size=(2, 9, 32)), jnp.float32)
    graph, state = nnx.split(layer_of(config))
    slope = jax.jit(jax.grad(lambda state: jnp.square(nnx.merge(graph, state)(x, None)).sum()))(state)
    router, matrices = slope['router']['kernel'], slope['glu_out']
    return float(jnp.abs(router[...]).max() / jnp.abs(matrices[...]).max())


def test_a_router_of_one_expert_learns_where_its_score_is_the_weight():
    assert slope_of_router(SWITCH) > 1e-2
    assert slope_of_router(dataclasses.replace(SWITCH, normalize=True)) < 1e-5


def test_training_refuses_one_expert_whose_weight_is_always_1():
    """Models with such layers stay possible, for imports; so does training that leaves their routers as they are."""
    one = Experts(n_experts=4, top_k=1, balance=0.01)
    model = ModelConfig(**TINY, feed_forward=(DenseLayer(), one))
    said = r'experts.normalize = True: .* of experts.top_k = 1 is always 1, .*; set experts.normalize = False \(Switch'
    with pytest.raises(ConfigError, match=said):
        plan_step(Experiment(model=model))
    plan_step(Experiment(model=model, optimizer=OptimizerConfig(frozen=('glu',))))
    plan_step(Experiment(model=ModelConfig(**TINY, feed_forward=SWITCH)))
    shape = MeshShape(data=None, fsdp=1, sequence=1, slices=1)
    check_training(TrainConfig(objective=Align(teacher='run')), OptimizerConfig(), DataConfig(), model, shape)


@pytest.mark.parametrize(
    ('fields', 'said'),
    [
        (dict(top_k=9), r'experts.top_k = 9: a token can choose from 8 experts'),
        (dict(groups=3), r'experts.groups = 3: must divide experts.n_experts = 8'),
        (dict(top_groups=2), r'experts.top_groups = 2: there are 1 groups'),
        (dict(groups=4, top_k=3), r'experts.top_k = 3: a token can choose from 2 experts'),
        (dict(shared_gate=True), r'experts.shared_gate = True: there is no shared expert; set experts.shared_dim'),
    ],
)
def test_impossible_experts_are_refused(fields, said):
    with pytest.raises(ConfigError, match=said):
        Experts(**fields)


def test_experts_without_biases():
    with pytest.raises(ConfigError, match=r'model.biases = True: experts have no biases'):
        ModelConfig(**TINY, feed_forward=Experts(), biases=True)
    with pytest.raises(ConfigError, match=r'model.feed_forward lists 3 layers'):
        ModelConfig(**TINY, feed_forward=(Experts(),) * 3)
