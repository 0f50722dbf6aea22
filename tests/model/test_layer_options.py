"""Each mechanism has options of its own: positions, convolution, norms, output gate and heads."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lm import model as model_lib
from lm.attention import Attention
from lm.attention.options import LayerOptions
from lm.attention.recurrent.delta import Delta
from lm.attention.recurrent.gated_linear import GatedLinear
from lm.attention.recurrent.retention import Retention
from lm.attention.rotary_scaling import LinearRotary
from lm.attention.softmax import Softmax
from lm.config.checks import list_parameters
from lm.config.names import is_omitted
from lm.config.text import dump
from lm.errors import ConfigError
from lm.experiment import load
from lm.interop.formats import FORMATS
from lm.interop.names import from_tensors, to_tensors
from lm.model import ModelConfig
from lm.model.functions import ModelFunctions, count_parameters, split
from lm.model.layers import find_same_layers, scan_pairs
from lm.model.options import RotaryOptions
from lm.runs.config_diff import compare_bindings, compare_texts, is_permitted, parse_bindings

TINY = dict(vocab_size=61, n_layers=2, d_model=32, n_heads=4, head_dim=8)
OWN = dict(
    rotary_base=500.0,
    rotary_fraction=0.5,
    key_offset=0.25,
    convolution=3,
    qk_norm=True,
    output_norm=True,
    output_gate_inputs=0.5,
    output_gate_rank=5,
    n_heads=2,
    n_kv_heads=1,
    head_dim=16,
)
DELTA = Delta(
    gate=True, rotary_base=None, convolution=4, output_gate=True, output_gate_form='sigmoid', n_heads=2, head_dim=12
)
HYBRID = (
    DELTA,
    Softmax(
        rotary_base=None, qk_norm=True, n_kv_heads=2, output_norm=True, output_gate=True, output_gate_form='sigmoid'
    ),
)
GIN = """
model.attention = [@delta(), @delta(), @delta(), @softmax()]
softmax.rotary_base = None
delta.convolution = 4
delta.output_gate = True
delta.output_gate_form = 'sigmoid'
"""


def build(attention, **changes) -> model_lib.Transformer:
    return nnx.jit(lambda: model_lib.build(ModelConfig(**TINY | {'attention': attention} | changes), seed=3))()


@nnx.jit
def logits(model, tokens):
    return model(tokens)


def decode(model) -> jax.Array:
    """Returns the logits, computed from a state in pieces of two sizes."""
    graph, arrays = nnx.split(model)
    step = jax.jit(lambda arrays, *arguments: nnx.merge(graph, arrays).decode_step(*arguments))
    state, parts = model.init_state(2, 20), []
    for start, end in ((0, 9), (9, 10), (10, 11), (11, 20)):
        state, part = step(arrays, state, tokens()[:, start:end], jnp.int32(start))
        parts.append(part)
    return jnp.concatenate(parts, axis=1)


def tokens(length: int = 20) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 61, (2, length))


def test_a_gin_file_sets_options_of_mechanisms():
    model = load([], [line for line in GIN.splitlines() if line]).model
    delta, softmax = (model.resolve(model.pattern[i]) for i in (0, 3))
    assert delta.rotary == RotaryOptions(64, 10_000.0)
    assert softmax.rotary is None
    assert (delta.convolution, softmax.convolution) == (4, None)
    assert (delta.output_gate_form, delta.gate_inputs, softmax.output_gate) == ('sigmoid', 768, False)
    kept = 3 * 3 * (768 * 768 + 4 * 3 * 768 + 768 * 12 + 64)  # gates, convolutions, beta and the gain of each norm
    plain = dataclasses.replace(model, attention=Softmax())
    assert sum(count_parameters(model).values()) - sum(count_parameters(plain).values()) == kept


def test_scopes_tell_layers_of_one_mechanism_apart():
    lines = ['model.attention = [@near/softmax(), @far/softmax()]', 'softmax.rotary_base = 500.0']
    lines += ['near/softmax.window = 16', 'far/softmax.rotary_base = None', 'model.n_layers = 2']
    lines += ['near/softmax.rotary_scaling = @linear_rotary()', 'linear_rotary.factor = 4.0']
    model = load([], lines).model
    assert [model.resolve(one).rotary for one in model.pattern] == [
        RotaryOptions(64, 500.0, 1.0, LinearRotary(factor=4.0)),
        None,
    ]


@pytest.mark.parametrize('form', ['silu', 'sigmoid'])
def test_options_of_the_only_mechanism_are_options_of_the_model(form):
    """Both have the same parameters and compute the same, to the last bit."""
    ours = build(Retention(**OWN, output_gate=True, output_gate_form=form))
    theirs = build(Retention(), **OWN, output_gate=True, output_gate_form=form)
    assert jax.tree.map(jnp.shape, nnx.state(ours)) == jax.tree.map(jnp.shape, nnx.state(theirs))
    np.testing.assert_array_equal(logits(ours, tokens()), logits(theirs, tokens()))
    assert ours.config.flops_per_token(64) == theirs.config.flops_per_token(64)


def test_the_norm_of_the_output_is_of_each_head_and_before_the_gate():
    """Values may have any size, and each head its own; the gate's factors remain."""
    model = build(Softmax(), output_norm=True, output_gate=True, output_gate_form='sigmoid')
    graph, arrays = nnx.split(model)
    plain = nnx.to_pure_dict(arrays)
    (norm,) = (x for path, x in jax.tree_util.tree_leaves_with_path(plain) if 'output_norm' in str(path))
    assert norm.shape == (2, 8)
    sizes = np.repeat([100.0, 200.0, 300.0, 400.0], 8)  # of the values of four heads

    def change(path, x):
        keys = str(path)
        if 'output_gate' in keys:
            return jnp.zeros_like(x)  # a factor of one half
        return x.at[..., -32:].multiply(sizes) if "'qkv'" in keys and 'kernel' in keys else x

    halved = jax.tree_util.tree_map_with_path(lambda path, x: 0 * x if 'output_gate' in str(path) else x, plain)
    found = []
    for changed in (halved, jax.tree_util.tree_map_with_path(change, plain)):
        nnx.replace_by_pure_dict(arrays, changed)
        found.append(logits(nnx.merge(graph, arrays), tokens()))
    np.testing.assert_allclose(found[1], found[0], atol=2e-3)
    without = build(Softmax(), output_gate=True, output_gate_form='sigmoid')
    assert not np.allclose(logits(without, tokens()), logits(model, tokens()), atol=1e-2)


WIDE = (
    Delta(
        gate=True,
        rotary_base=None,
        convolution=4,
        n_heads=2,
        n_value_heads=4,
        value_dim=12,
        output_gate=True,
        output_gate_form='sigmoid',
    ),
    Softmax(n_heads=4, n_kv_heads=1, n_value_heads=2, value_dim=6, qk_norm=True, key_offset=0.5, output_norm=True),
    GatedLinear(gate='ssd', n_heads=1, head_dim=16, n_value_heads=4, rotary_base=None),
)


def test_value_heads_repeat_the_key_heads():
    """Two heads of queries and keys for four values equal four heads whose matrices repeat in pairs."""
    ours = build(Delta(gate=True, n_heads=2, n_value_heads=4, qk_norm=True), convolution=3)
    theirs = build(Delta(gate=True, n_heads=4, qk_norm=True), convolution=3)
    assert ours.config.resolve(ours.config.attention).dims == theirs.config.resolve(theirs.config.attention).dims

    def repeat(x):
        q, k, v = np.split(np.asarray(x), [16, 32], axis=-1)
        q, k = (np.repeat(y.reshape(*y.shape[:-1], 2, 8), 2, axis=-2).reshape(*y.shape[:-1], 32) for y in (q, k))
        return np.concatenate([q, k, v], axis=-1)

    def change(path, x):
        return repeat(x) if 'qkv' in str(path) or "'convolution'" in str(path) else x

    arrays = jax.tree_util.tree_map_with_path(change, nnx.to_pure_dict(nnx.state(ours)))
    graph, state = nnx.split(theirs)
    nnx.replace_by_pure_dict(state, arrays)
    expected = logits(nnx.merge(graph, state), tokens())
    np.testing.assert_allclose(logits(ours, tokens()), expected, atol=1e-5, rtol=1e-5)


def test_models_with_wide_values_decode_and_learn_and_do_not_look_ahead():
    model = build(WIDE, n_layers=3, sinusoids=False)
    sizes = [nnx.to_pure_dict(nnx.state(block))['qkv']['kernel'].shape[-1] for block in model.blocks]
    assert sizes == [(2 + 2) * 8 + 4 * 12, (4 + 1) * 8 + 2 * 6, (1 + 1) * 16 + 4 * 16]
    widths = [model.config.resolve(one).width for one in WIDE]
    assert widths == [4 * 12, 4 * 6, 4 * 16]
    for options, block in zip(map(model.config.resolve, WIDE), model.blocks, strict=True):
        arrays = nnx.to_pure_dict(nnx.state(block))
        kernels = [arrays[name]['kernel'] for name in ('qkv', 'attention_out', 'mechanism_in') if name in arrays]
        kernels += [arrays['output_gate']['kernel']] if options.output_gate else []
        assert options.count_products(32) == sum(kernel.size for kernel in kernels)
    expected = logits(model, tokens())
    np.testing.assert_allclose(decode(model), expected, atol=2e-5, rtol=2e-5)
    after = logits(model, np.where(np.arange(20) == 13, (tokens() + 1) % 61, tokens()))
    np.testing.assert_array_equal(expected[:, :13], after[:, :13])
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    loss = lambda p: nnx.merge(graph, p, rest).token_losses(tokens()[:, :-1], tokens()[:, 1:]).mean()  # noqa: E731
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(jax.jit(jax.grad(loss))(params)))


def test_values_as_wide_as_keys_are_the_default():
    stated, plain = (ModelConfig(**TINY, **more) for more in ({'value_dim': 8, 'n_value_heads': 4}, {}))
    assert stated.resolve(stated.attention) == plain.resolve(plain.attention)


def test_a_mechanism_can_have_less_than_the_model():
    less = dict(rotary_base=None, key_offset=0.0, convolution=None, qk_norm=False, output_gate=False)
    more = dict(key_offset=0.5, convolution=4, qk_norm=True, output_gate=True)
    ours, plain = build(Softmax(**less), **more), build(Softmax(), rotary_base=None)
    np.testing.assert_array_equal(logits(ours, tokens()), logits(plain, tokens()))
    assert not np.array_equal(logits(build(Softmax(), **more), tokens()), logits(plain, tokens()))


def test_a_hybrid_model_decodes_and_does_not_look_ahead():
    model = build(HYBRID, sinusoids=False)
    expected = logits(model, tokens())
    np.testing.assert_allclose(decode(model), expected, atol=2e-5, rtol=2e-5)
    after = logits(model, np.where(np.arange(20) == 13, (tokens() + 1) % 61, tokens()))
    np.testing.assert_array_equal(expected[:, :13], after[:, :13])


def test_the_last_repeat_of_a_pattern_may_be_cut():
    """Five layers of a pattern of two equal a list of the five: after the same arrays under the names of layers."""
    cut = build(HYBRID, n_layers=5, remat='full', sinusoids=False)
    listed = build((*HYBRID, *HYBRID, HYBRID[0]), n_layers=5, sinusoids=False)
    assert [nnx.to_pure_dict(nnx.state(block))['qkv']['kernel'].shape[0] for block in cut.blocks] == [2, 2, 1]
    (_, params, buffers), (graph, *parts) = split(cut), split(listed)
    names = ('params', 'buffers')
    tensors = to_tensors(dict(zip(names, (params, buffers), strict=True)))
    assert {name for name in tensors if name.endswith('.qkv.weight')} == {f'layers.{i}.qkv.weight' for i in range(5)}
    moved = from_tensors(tensors, dict(zip(names, parts, strict=True)), 'the list')
    listed = nnx.merge(graph, moved['params'], moved['buffers'])
    expected = logits(listed, tokens())
    np.testing.assert_allclose(logits(cut, tokens()), expected, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(decode(cut), expected, atol=2e-5, rtol=2e-5)
    assert cut.config.flops_per_token(64) == listed.config.flops_per_token(64)
    inputs = [module.config for module, *_ in cut.attention_inputs(tokens())]
    assert inputs == [*HYBRID, *HYBRID, HYBRID[0]]


def test_two_models_go_through_their_layers_together_where_a_pattern_is_cut():
    cut, plain = build(HYBRID, n_layers=5), build(Softmax(), n_layers=5)
    positions = jnp.arange(20)

    @nnx.jit
    def outputs(first, second):
        def call(x_BxLxD, ours, theirs, number):
            return ours.block(x_BxLxD, ours.rotation), (number, theirs.block(x_BxLxD, theirs.rotation))

        x_BxLxD, found = scan_pairs(first, second, positions, call, first.embed(tokens(), positions), jnp.arange(5))
        return first.final_norm(x_BxLxD), found

    hidden, (numbers, others) = outputs(cut, plain)
    np.testing.assert_array_equal(numbers, np.arange(5))
    np.testing.assert_allclose(hidden, cut.hidden(tokens()), atol=1e-5, rtol=1e-5)
    assert others.shape == (5, 2, 20, 32)
    cut_functions = ModelFunctions(cut.config, jnp.float32)
    found = [cut_functions.config.find_layer(i) for i in range(5)]
    assert found == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0)]
    assert find_same_layers(cut_functions, cut_functions) == {0, 1, 2}


def test_the_parameters_of_a_hybrid_model_learn():
    """All parameters of all layers have gradients, and matrices and convolutions are of each layer's own heads."""
    model = build(HYBRID)
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    shapes = [nnx.to_pure_dict(params)['blocks'][i]['qkv']['kernel'].shape for i in (0, 1)]
    assert shapes == [(1, 32, 3 * 2 * 12), (1, 32, (4 + 2 + 2) * 8)]
    loss = lambda p: nnx.merge(graph, p, rest).token_losses(tokens()[:, :-1], tokens()[:, 1:]).mean()  # noqa: E731
    gradients = jax.jit(jax.grad(loss))(params)
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(gradients))


def test_layers_with_the_same_positions_share_one_rotation():
    pattern = tuple(Softmax(window=w, rotary_base=b) for w, b in ((4, 'model'), (5, 500.0), (6, 10_000.0), (7, None)))
    model = build(pattern, sinusoids=False, n_layers=4)
    program = str(jax.make_jaxpr(model.hidden)(tokens()))
    assert program.count('= cos ') == 2


def test_config_gin_states_options_that_are_set():
    """A mechanism without options of its own is written and compared as before there were any."""
    plain, own = Softmax(), Softmax(rotary_base=None, output_gate=True, output_gate_form='silu')
    options = {field.name for field in dataclasses.fields(Attention)}
    assert {name.partition('=')[0] for name in repr(plain)[8:-1].split(', ')} == vars(plain).keys() - options
    experiment = load([], ['model.attention = @softmax()'])
    text = dump(experiment)
    stated = {line.partition(' =')[0] for line in text.splitlines() if line.startswith('softmax.')}
    assert stated == {f'softmax.{name}' for name in vars(plain).keys() - options}
    changed = dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, attention=own))
    other = dump(changed)
    assert "softmax.output_gate = True\nsoftmax.output_gate_form = 'silu'\nsoftmax.rotary_base = None\n" in other
    found = compare_texts(text, other)
    assert {change.binding for change in found} == {
        f'softmax.{name}' for name in ('output_gate', 'output_gate_form', 'rotary_base')
    }
    assert not any(is_permitted(change, {}, {}, False) for change in found)
    assert {change.old for change in found} == {"'model'"}  # which reports leave out, as config.gin does
    assert all(is_omitted(change.binding, "'model'") for change in found)
    assert not any(is_omitted(change.binding, change.new) for change in found)


@pytest.mark.parametrize(
    ('before', 'today'),
    [
        ("'sigmoid'", {'softmax.output_gate': 'True', 'softmax.output_gate_form': "'sigmoid'"}),
        ('None', {'softmax.output_gate': 'False'}),
    ],
)
def test_a_gate_is_read_as_earlier_versions_wrote_it(before, today):
    """A run whose mechanism has a gate goes on without a change."""
    text = f'model.attention = @softmax()\nsoftmax.output_gate = {before}\n'
    experiment = load([], text.splitlines())
    assert today.items() <= parse_bindings(text).items()
    found = compare_bindings(parse_bindings(text), parse_bindings(dump(experiment)))
    assert not [change for change in found if change.binding.startswith('softmax.')]
    layer = experiment.model.resolve(experiment.model.pattern[0])
    assert (layer.output_gate, layer.output_gate_form) == ((False, 'silu') if before == 'None' else (True, 'sigmoid'))


def test_the_options_of_layers_are_declared_once():
    """The model and the mechanisms have the same options, under their names in gin files."""
    options = {field.name for field in dataclasses.fields(LayerOptions)}
    assert {field.name for field in dataclasses.fields(Attention)} == options
    assert options < set(list_parameters('model'))
    assert 'layer' not in list_parameters('model')
    assert len(dataclasses.fields(ModelConfig)) <= 25
    flat = ModelConfig(n_heads=3, rotary_base=None)
    assert flat == ModelConfig(layer=LayerOptions(n_heads=3, rotary_base=None))
    assert dataclasses.replace(flat, n_heads=6).layer == LayerOptions(n_heads=6, rotary_base=None)


def test_values_outside_their_range_are_refused_by_name():
    for name, value, problem in (
        ('rotary_base', 'modle', "must be a float or None or 'model'"),
        ('rotary_base', 0.5, 'must be above 1'),
        ('output_gate_form', 'relu', 'must be one of silu, sigmoid'),
        ('convolution', 1, 'must be at least 2'),
        ('qk_norm', None, "must be a bool \\(True or False\\) or 'model'"),
    ):
        with pytest.raises(ConfigError, match=rf'^softmax\.{name} = {value!r}: {problem}'):
            Softmax(**{name: value})
    with pytest.raises(ConfigError, match=r'^softmax\.n_kv_heads = 3: must divide model\.n_heads = 4$'):
        ModelConfig(**TINY, attention=Softmax(n_kv_heads=3))
    with pytest.raises(ConfigError, match=r'^model\.n_kv_heads = 2: must divide softmax\.n_heads = 3$'):
        ModelConfig(**TINY, n_kv_heads=2, attention=Softmax(n_heads=3))
    with pytest.raises(ConfigError, match=r'^delta\.n_value_heads = 6: must be a multiple of model\.n_kv_heads = 4$'):
        ModelConfig(**TINY, attention=Delta(n_value_heads=6))
    with pytest.raises(ConfigError, match=r'^model\.n_value_heads = 6: must divide .* = 4, or be a multiple of it$'):
        ModelConfig(**TINY, n_kv_heads=2, n_value_heads=6, attention=Softmax())


def test_the_model_for_transformers_has_options_of_layers():
    for base in (10_000.0, None):
        FORMATS['huggingface'].check(ModelConfig(**TINY, attention=(Retention(), Softmax(rotary_base=base))))
