"""The model has the paper's sizes; for every mechanism, no token sees the future and decoding equals training."""

import dataclasses
import functools
import re

import grids
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from mechanisms_list import MECHANISMS, QUICK_FIRST

from lm import model as model_lib
from lm.attention.polynomial import Polynomial
from lm.attention.polysketch import Polysketch
from lm.attention.rotary_scaling import LinearRotary, Llama3Rotary, YarnRotary
from lm.attention.softmax import Softmax
from lm.errors import ConfigError
from lm.model import ModelConfig, transformer
from lm.model.functions import count_parameters
from lm.model.parts.key_offset import offset_keys, select_channels
from lm.model.positions import rotary
from lm.ops import tpu
from lm.ops.rotary import rotate
from lm.parameters import declarations

SIZES = {
    'small': dict(n_layers=12, d_model=768, n_heads=12),
    'medium': dict(n_layers=24, d_model=1024, n_heads=16),
    'large': dict(n_layers=36, d_model=1280, n_heads=20),
}
GPT2 = dict(gated=False, biases=True, learned_positions=32, sinusoids=False, rotary_base=None)
TINY = dict(vocab_size=97, n_layers=2, d_model=32, n_heads=4, head_dim=8)


@functools.cache
def tiny(attention, **changes) -> model_lib.Transformer:
    config = ModelConfig(**(TINY | {'attention': attention} | changes))
    return nnx.jit(lambda: model_lib.build(config, seed=3))()


@nnx.jit
def logits(model, tokens):
    return model(tokens)


@nnx.jit
def losses(model, tokens):
    return model.token_losses(tokens[:, :-1], tokens[:, 1:])


@pytest.mark.smoke
@pytest.mark.parametrize(('size', 'millions'), [('small', 110), ('medium', 337), ('large', 748)])
@pytest.mark.parametrize('attention', [Softmax(), Polynomial(degree=4)], ids=lambda a: a.gin_name)
def test_parameter_counts_of_appendix_h(size, millions, attention):
    counts = count_parameters(ModelConfig(**SIZES[size], attention=attention))
    assert sum(counts.values()) == pytest.approx(millions * 1e6, rel=0.01)


def test_parameters_of_gpt2():
    """GPT-2 small has 124,439,808 parameters, as in its checkpoint. Only its matrices are decayed."""
    config = ModelConfig(vocab_size=50_257, **(GPT2 | {'learned_positions': 1024}))
    assert sum(count_parameters(config).values()) == 124_439_808
    told = declarations(nnx.eval_shape(lambda: model_lib.build(config, 0)))
    decayed = {jax.tree_util.keystr(path) for path, one in jax.tree_util.tree_leaves_with_path(told) if one.decayed}
    assert {path.rpartition("['")[2] for path in decayed} == {"kernel']"}
    assert config.flops_per_token(1024) == pytest.approx(6 * (12 * 12 * 768**2 + 50_257 * 768 + 12 * 2 * 512 * 768))


def test_parameter_count_by_part():
    counts = count_parameters(ModelConfig())
    assert counts['embedding'] == 32_000 * 768
    assert counts['attention'] == 12 * 4 * 768**2
    assert counts['glu'] == 12 * 3 * 768 * 2048
    assert counts['norms'] == (2 * 12 + 1) * 2 * 768
    assert counts['mechanism'] == 0


@pytest.mark.parametrize('attention', MECHANISMS.values(), ids=MECHANISMS.keys())
def test_a_token_changes_nothing_before_it(attention):
    model = tiny(attention, n_kv_heads=2)
    tokens = np.random.default_rng(0).integers(0, 97, (2, 20))
    before = logits(model, jnp.asarray(tokens))
    tokens[:, 13] += 1
    after = logits(model, jnp.asarray(tokens % 97))
    np.testing.assert_array_equal(before[:, :13], after[:, :13])
    assert np.abs(before[:, 13:16] - after[:, 13:16]).max(axis=(0, 2)).min() > 0


@pytest.mark.smoke
@pytest.mark.parametrize(
    ('attention', 'changes'),
    [*((form, {}) for form in MECHANISMS.values()), (Softmax(), GPT2)],
    ids=[*MECHANISMS, 'softmax of GPT-2'],
)
def test_decoding_equals_the_parallel_form(attention, changes):
    check_decoding(tiny(attention, n_kv_heads=2, **changes))


def test_decoding_with_a_logit_cap():
    model = tiny((Softmax(), Softmax(window=5)), n_kv_heads=2, logit_cap=1.5)
    assert np.abs(check_decoding(model)).max() < 1.5


def check_decoding(model):
    """Compares prefilling and single steps with the logits computed at once; returns these, [2, 20, V]."""
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 97, (2, 20)))
    expected = logits(model, tokens)
    graph, arrays = nnx.split(model)
    step = jax.jit(lambda arrays, *arguments: nnx.merge(graph, arrays).decode_step(*arguments))
    state, prefill = step(arrays, model.init_state(2, 20), tokens[:, :9], jnp.int32(0))
    parts = [prefill]
    for t in range(9, 20):
        state, one = step(arrays, state, tokens[:, t : t + 1], jnp.int32(t))
        parts.append(one)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), expected, atol=2e-5, rtol=2e-5)
    return expected


BLOCK = dict(convolution=4, qk_norm=True, output_gate=True)


HEADS = dict(key_offset=0.5, rotary_fraction=0.5, output_gate=True, output_gate_form='sigmoid', output_gate_inputs=0.25)


GEMMA = dict(norm='rms', norm_epsilon=1e-3, norm_placement='both', embedding_scale=2.0, qkv_biases=True)
OLMO = dict(norm='rms', norm_placement='after', qk_norm=True, qk_norm_span='projection', rotary_scaling=YarnRotary())
OPTIONS = [BLOCK, HEADS, BLOCK | HEADS, HEADS | dict(rotary_base=None), GEMMA, OLMO]


@pytest.mark.parametrize('options', grids.draw((pytest.param(one, id=str(one)) for one in OPTIONS), 2))
def test_block_options_decode_and_do_not_look_ahead(options):
    model = tiny((Polysketch(gate=True, sketch_size=8, block=8), Softmax()), n_kv_heads=2, **options)
    tokens = np.random.default_rng(1).integers(0, 97, (2, 20))
    graph, arrays = nnx.split(model)
    expected = logits(model, tokens)
    step = jax.jit(lambda arrays, *arguments: nnx.merge(graph, arrays).decode_step(*arguments))
    state, parts = model.init_state(2, 20), []
    for start, end in ((0, 9), (9, 10), (10, 11), (11, 20)):  # two sizes, each compiled once
        state, part = step(arrays, state, tokens[:, start:end], jnp.int32(start))
        parts.append(part)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), expected, atol=2e-5, rtol=2e-5)
    after = logits(model, np.where(np.arange(20) == 13, (tokens + 1) % 97, tokens))
    np.testing.assert_array_equal(expected[:, :13], after[:, :13])


def test_a_quarter_of_the_channels_decides_the_output_gate():
    """The gate has a matrix of a quarter, and its form is what the formula says."""
    whole, quarter = (ModelConfig(**TINY, output_gate=True, output_gate_inputs=share) for share in (1.0, 0.25))
    assert sum(count_parameters(whole).values()) - sum(count_parameters(quarter).values()) == 2 * 24 * 32
    assert whole.flops_per_token(64) - quarter.flops_per_token(64) == 3 * 2 * 2 * 24 * 32
    narrow = dataclasses.replace(whole, output_gate_rank=3)
    saved = 32 * 32 - 3 * (32 + 32)
    assert sum(count_parameters(whole).values()) - sum(count_parameters(narrow).values()) == 2 * saved
    assert whole.flops_per_token(64) - narrow.flops_per_token(64) == 3 * 2 * 2 * saved
    tokens = jnp.arange(10)[None]
    half = tiny(Softmax(), output_gate=True, output_gate_form='sigmoid')
    graph, params, rest = nnx.split(half, nnx.Param, ...)
    for path, kernel in jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(params)):
        if 'output_gate' in jax.tree_util.keystr(path):
            params['blocks'][0]['output_gate']['kernel'][...] = jnp.zeros_like(kernel)
        if 'attention_out' in jax.tree_util.keystr(path):
            params['blocks'][0]['attention_out']['kernel'][...] = 2 * kernel
    open_gate = nnx.merge(graph, params, rest)  # a gate of ½ and twice the output are a model without a gate
    np.testing.assert_allclose(logits(open_gate, tokens), logits(tiny(Softmax()), tokens), rtol=0, atol=1e-5)


def test_key_offset():
    """The chosen channels, those without positions first, come from the token before; a document begins with zeros."""
    assert select_channels(8, 0.5).tolist() == [False, False, True, True] * 2
    assert not select_channels(8, 0.0).any()
    assert select_channels(8, 1.0).all()
    k = jax.random.normal(jax.random.key(0), (1, 5, 2, 8))
    expected = np.array(k)
    expected[:, 1:, :, [2, 3, 6, 7]] = k[:, :-1, :, [2, 3, 6, 7]]
    expected[:, 0, :, [2, 3, 6, 7]] = 0.0
    np.testing.assert_array_equal(offset_keys(k, 0.5)[0], expected)
    expected[:, 3, :, [2, 3, 6, 7]] = 0.0
    starts = jnp.asarray([[0, 0, 0, 3, 3]])
    np.testing.assert_array_equal(offset_keys(k, 0.5, starts_BxL=starts)[0], expected)


def test_rotary_fraction():
    """The first pairs turn as in a head of that size; the others keep their values at every position."""
    positions = jnp.arange(7)
    part, small = rotary(positions, 16, 100.0, 0.25), rotary(positions, 4, 100.0)
    np.testing.assert_array_equal(part.cos_AxLx1xP[..., :2], small.cos_AxLx1xP)
    np.testing.assert_array_equal(part.sin_AxLx1xP[..., :2], small.sin_AxLx1xP)
    assert (part.cos_AxLx1xP[..., 2:] == 1).all()
    assert (part.sin_AxLx1xP[..., 2:] == 0).all()


def test_an_amplitude_leaves_pairs_that_do_not_turn_as_they_are():
    """So do the layers of Qwen3-Next, which rotate a part of a head and join the rest to it."""
    yarn = YarnRotary(attention_factor=1.5)
    part, small = (rotary(jnp.arange(5), size, 1000.0, share, yarn) for size, share in ((16, 0.25), (4, 1.0)))
    for found, turned, still in zip(part, small, (1, 0), strict=True):
        np.testing.assert_array_equal(found[..., :2], turned)
        assert (found[..., 2:] == still).all()
    assert part.cos_AxLx1xP[0, 0, 0] == 1.5
    x_BxLxNxC = jax.random.normal(jax.random.key(0), (2, 5, 3, 16))
    for implementation in ('xla', 'reference'):
        q, k = rotate(x_BxLxNxC, part, 2, implementation=implementation)
        still = jnp.concatenate([q, k], axis=2).reshape(2, 5, 3, 2, 8)[..., 2:]
        np.testing.assert_array_equal(still, x_BxLxNxC.reshape(2, 5, 3, 2, 8)[..., 2:])


def test_scaled_rotary_positions():
    """Low frequencies are divided and high ones kept; YaRN also makes queries and keys longer."""
    frequencies = 2 * np.pi * np.array([0.1, 0.02, 0.01, 0.001]) ** np.ones(4)  # 10, 2, 1 and 0.1 turns per 100 tokens
    scale = lambda scaling: np.asarray(scaling.scale(jnp.asarray(frequencies), 1000.0)) / frequencies  # noqa: E731
    np.testing.assert_allclose(scale(LinearRotary(factor=4.0)), 0.25, rtol=1e-6)
    llama3 = Llama3Rotary(factor=4.0, length=100, low_turns=1.0, high_turns=3.0)
    np.testing.assert_allclose(scale(llama3), [1, 0.5 + 0.5 / 4, 0.25, 0.25], rtol=1e-6)
    # The pairs of a head of 8 with 5.62 and 0.178 turns per 100 tokens are the first and the last with base 1000^(4/3).
    yarn = YarnRotary(factor=4.0, length=100, low_turns=0.178, high_turns=5.62, whole=True)
    first = [8 * np.log(100 / (2 * np.pi * turns)) / (2 * np.log(1000)) for turns in (5.62, 0.178)]
    assert 0 < first[0] < 1
    assert 2 < first[1] < 3
    np.testing.assert_allclose(scale(yarn), 1 - 0.75 * np.array([0, 1 / 3, 2 / 3, 1]), rtol=1e-6)
    plain, scaled = rotary(jnp.arange(3), 8, 1000.0), rotary(jnp.arange(3), 8, 1000.0, 1.0, yarn)
    np.testing.assert_allclose(scaled.cos_AxLx1xP[0], plain.cos_AxLx1xP[0] * (1 + np.log(4) / 10), rtol=1e-6)
    with pytest.raises(ConfigError, match=r'llama3_rotary.low_turns = 4.0: must be below llama3_rotary.high_turns'):
        Llama3Rotary(low_turns=4.0)


def test_options_of_other_families_change_the_layer_as_they_say():
    """Each is compared with the same parameters under the default."""
    tokens = jnp.arange(10)[None]
    plain = tiny(Softmax(), norm='rms')

    def changed(**options):
        given = nnx.to_pure_dict(nnx.state(plain))
        model = tiny(Softmax(), norm='rms', **options)
        own = nnx.to_pure_dict(nnx.state(model))

        def merge(own, given):
            return {
                k: merge(v, given[k]) if isinstance(v, dict) and k in given else given.get(k, v) for k, v in own.items()
            }

        state = nnx.state(model)
        nnx.replace_by_pure_dict(state, merge(own, given))
        return logits(nnx.merge(nnx.graphdef(model), state), tokens)

    before = logits(plain, tokens)
    np.testing.assert_allclose(changed(embedding_scale=32**0.5), before, rtol=0, atol=1e-5)
    np.testing.assert_allclose(changed(qkv_biases=True), before, rtol=0, atol=1e-5)  # they begin as zeros
    assert np.abs(changed(norm_epsilon=0.1) - before).max() > 1e-3
    counts = {place: sum(count_parameters(ModelConfig(**TINY, norm='rms', norm_placement=place)).values())
              for place in ('before', 'after', 'both')}  # fmt: skip
    assert counts['before'] == counts['after'] == counts['both'] - 2 * 2 * 32
    spans = [count_parameters(ModelConfig(**TINY, n_kv_heads=2, qk_norm=True, qk_norm_span=span))['attention']
             for span in ('head', 'projection')]  # fmt: skip
    assert spans[1] - spans[0] == 2 * ((4 + 2) * 8 - 2 * 8)


def test_block_options_count():
    """The parameters of the options count, and all of them learn. Their products count in the FLOPs."""
    config, plain = (
        ModelConfig(**TINY | dict(attention=Softmax(gate=True)), **BLOCK),
        ModelConfig(**TINY | dict(attention=Softmax())),
    )
    own, gate, layers = 32 * 4, 32 * 32, 2
    more = {part: n - count_parameters(plain)[part] for part, n in count_parameters(config).items() if n}
    small = 4 * 96 + 2 * 8  # convolutions, and the gains of queries and keys
    expected = {'attention': layers * (gate + small), 'mechanism': layers * (own + 4)}
    assert {part: n for part, n in more.items() if n} == expected
    assert config.flops_per_token(64) - plain.flops_per_token(64) == 3 * 2 * layers * (own + gate)
    model = model_lib.build(config, 0)
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    tokens = jnp.asarray(np.random.default_rng(4).integers(0, 97, (2, 17)))
    loss = lambda p: nnx.merge(graph, p, rest).token_losses(tokens[:, :-1], tokens[:, 1:]).mean()  # noqa: E731
    gradients = jax.jit(jax.grad(loss))(params)
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(gradients))


@pytest.mark.parametrize('cap', [None, 1.5])
def test_nats_are_the_log_softmax_of_the_logits(cap):
    model = tiny(Softmax(), logit_cap=cap)
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, 97, (2, 17)))
    plain = np.asarray(logits(tiny(Softmax()), tokens), np.float64)
    expected = plain if cap is None else cap * np.tanh(plain / cap)
    found = logits(model, tokens)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    nats = losses(model, tokens)
    found = np.asarray(found, np.float64)[:, :-1]
    expected = np.log(np.exp(found).sum(-1)) - np.take_along_axis(found, np.asarray(tokens)[:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(nats, expected, rtol=1e-5)


@pytest.mark.parametrize('attention', QUICK_FIRST)
def test_a_model_starts_at_the_logarithm_of_its_vocabulary(attention):
    """The loss is within 3 % for random tokens and for a repeated token: a token does not predict itself better than
    others.

    The other forms use a smaller vocabulary: their golden losses begin with this loss.
    """
    model = tiny(attention, vocab_size=32_000, d_model=128, n_heads=4, head_dim=32)
    tokens = np.random.default_rng(4).integers(0, 32_000, (2, 33))
    tokens[1] = tokens[1, 0]
    nats_BxL = losses(model, tokens)
    np.testing.assert_allclose(nats_BxL[0].mean(), np.log(32_000), rtol=0.03)
    np.testing.assert_allclose(nats_BxL[1].mean(), np.log(32_000), atol=3)


REMATS = ('full', 'dots', 'dense', 'attention')


@functools.cache
def gradients(**changes):
    tokens = jnp.asarray(np.random.default_rng(4).integers(0, 97, (2, 17)))
    graph, params, rest = nnx.split(tiny(Softmax(), **changes), nnx.Param, ...)
    loss = lambda p: nnx.merge(graph, p, rest).token_losses(tokens[:, :-1], tokens[:, 1:]).mean()  # noqa: E731
    return jax.jit(jax.grad(loss))(params)


@pytest.mark.parametrize('change', [*({'remat': r} for r in REMATS), {'unroll': 2}], ids=str)
def test_remat_and_unrolling_change_nothing_that_is_learned(change):
    plain, changed = gradients(), gradients(**change)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), plain, changed)
    assert model_lib.REMAT.keys() == {'none', *REMATS}


@pytest.mark.parametrize(
    ('platform', 'shared', 'changes', 'layers'),
    [
        ('tpu', False, {}, 2),
        ('tpu', False, {'remat': 'dots'}, 2),
        ('tpu', False, {'remat': 'full'}, 1),  # XLA would keep what it is to recompute
        ('tpu', True, {}, 1),
        ('tpu', False, {'unroll': 1}, 1),
        ('cpu', False, {}, 1),
        ('cpu', False, {'unroll': 2}, 2),
    ],
    ids=str,
)
def test_a_step_on_a_tpu_with_all_parameters_has_no_loop_over_layers(platform, shared, changes, layers, monkeypatch):
    monkeypatch.setattr(transformer, 'target_platform', lambda: platform)
    tokens_BxL = jnp.zeros((2, 16), int)
    graph, params, rest = nnx.split(tiny(Softmax(implementation='xla'), **changes), nnx.Param, ...)

    def loss(params):
        share_BxL = jnp.ones(tokens_BxL.shape)
        return nnx.merge(graph, params, rest).weighted_loss(tokens_BxL, tokens_BxL, share_BxL)[0].sum()

    with jax.set_mesh(jax.make_mesh((2 if shared else 1,), ('fsdp',), axis_types=(jax.sharding.AxisType.Auto,))):
        text = str(jax.make_jaxpr(loss)(params))
    assert re.findall(r'\bunroll=(\d+)', text)[0] == str(layers)


def test_a_single_window_on_a_tpu_gives_the_gradients_of_other_platforms(monkeypatch):
    tokens = jnp.asarray(np.random.default_rng(6).integers(0, 97, (2, 161)))
    config = ModelConfig(**TINY, attention=Softmax(implementation='xla'))
    graph, params, rest = nnx.split(model_lib.build(config, seed=3), nnx.Param, ...)

    def loss(params, tokens):
        return nnx.merge(graph, params, rest).token_losses(tokens[:, :-1], tokens[:, 1:]).mean()

    def hidden(tokens):
        traced_anew = jax.make_jaxpr(lambda *arguments: loss(*arguments))(params, tokens)
        return f'f32[160,{config.glu_dim}] = tanh' in str(traced_anew)  # its tokens are then one axis

    assert not hidden(tokens[:1])
    others = jax.jit(jax.grad(loss))(params, tokens[:1])
    monkeypatch.setattr(tpu, 'target_platform', lambda: 'tpu')
    assert hidden(tokens[:1])
    assert not hidden(tokens)
    alone = jax.jit(jax.grad(lambda *arguments: loss(*arguments)))(params, tokens[:1])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), others, alone)
    with jax.set_mesh(jax.sharding.Mesh(np.array(jax.devices()[:2]), ('data',))):  # one window per device
        assert tpu.lone_windows(jnp.zeros((2, 160, 3))).shape == (320, 3)
        assert tpu.lone_windows(jnp.zeros((4, 160, 3))).ndim == tpu.lone_windows(jnp.zeros((2, 1, 3))).ndim == 3


def test_bfloat16_stays_close_to_float32():
    tokens = jnp.asarray(np.random.default_rng(5).integers(0, 97, (2, 33)))
    full, half = (losses(tiny(Softmax(), dtype=dtype), tokens) for dtype in ('float32', 'bfloat16'))
    assert half.dtype == jnp.float32
    np.testing.assert_allclose(half, full, rtol=0.05, atol=0.05)


def test_layers_differ_and_only_depend_on_the_seed():
    one, two, other = (model_lib.build(ModelConfig(**TINY), seed) for seed in (1, 1, 2))
    kernel = one.blocks[0].qkv.kernel[...]
    assert kernel.shape == (2, 32, 96)
    assert (kernel[0] != kernel[1]).any()
    np.testing.assert_array_equal(kernel, two.blocks[0].qkv.kernel[...])
    assert (kernel != other.blocks[0].qkv.kernel[...]).any()


def test_all_bits_of_a_seed_count():
    """JAX takes 32 of the bits: 2 and 2 + 2**32 had the same parameters, but different batches."""
    seeds = [2, 2 + 2**32, 2 + 2**33, 2 + 2**63 - 2**32]
    assert len({tuple(jax.random.key_data(model_lib.make_seed_key(seed)).tolist()) for seed in seeds}) == len(seeds)
    assert model_lib.make_seed_key(2) == jax.random.key(2)


def test_wrong_shapes_are_refused():
    with pytest.raises(ConfigError, match=r'model.n_kv_heads = 3: must divide model.n_heads = 4'):
        ModelConfig(**TINY, n_kv_heads=3)
    with pytest.raises(ConfigError, match=r'model.attention lists 3 mechanisms: more than model.n_layers = 2'):
        ModelConfig(**(TINY | {'attention': (Softmax(), Softmax(), Softmax())}))


def test_flops_per_token_by_hand():
    config = ModelConfig(attention=Softmax())
    matmuls = 12 * (4 * 768**2 + 3 * 768 * 2048) + 32_000 * 768
    # Scores and values over half of the context: 2 multiply-adds of size 768 with each of 512 keys.
    attention = 12 * 2 * 2 * 512 * 768
    assert config.flops_per_token(1024) == pytest.approx(3 * (2 * matmuls + attention), rel=0.01)
