"""Each family of checkpoints is imported and gives what `transformers` computed from it; no test needs PyTorch."""

import copy
import dataclasses
import json
import re

import checkpoints
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import shapes
import tiny
from flax import nnx
from safetensors.numpy import load_file, save_file

import lm
from lm.attention import find_layer_type
from lm.attention.hybrid import Hybrid
from lm.attention.softmax import Softmax
from lm.cli import main
from lm.config.text import dump
from lm.errors import ConfigError
from lm.interop.checkpoints import open_checkpoint
from lm.interop.families import FAMILIES, choose
from lm.interop.families.decoder import find_pattern
from lm.interop.families.rotary_entry import RotaryEntry
from lm.interop.formats import FORMATS
from lm.interop.hyperparameters import Hyperparameters
from lm.interop.import_run import describe_model, load_given, read_weights
from lm.interop.names import from_tensors, to_tensors
from lm.interop.native import NativeFormat, find_family
from lm.model.feed_forward.experts import Experts
from lm.model.functions import ModelFunctions, split


def read(folder):
    """Returns the model that `lm import` makes of a folder, with its weights."""
    checkpoint = open_checkpoint(folder)
    family = choose(checkpoint.config, folder)
    functions = ModelFunctions(describe_model(family, checkpoint), jnp.float32)
    weights = jax.tree.map(jnp.asarray, read_weights(family, checkpoint, functions))
    return functions.merge(weights)


@nnx.jit
def logits(model, tokens):
    return model(tokens)


def decode(model, tokens):
    """Returns the logits of a prompt and of the tokens after it, by the decoding state."""
    graph, arrays = nnx.split(model)
    step = jax.jit(lambda arrays, *arguments: nnx.merge(graph, arrays).decode_step(*arguments))
    state, parts = model.init_state(1, tokens.shape[1]), []
    for start in range(0, tokens.shape[1], checkpoints.WRITTEN):
        state, part = step(arrays, state, tokens[:, start : start + checkpoints.WRITTEN], jnp.int32(start))
        parts.append(part)
    return jnp.concatenate(parts, axis=1)


def weights_of(model):
    """Returns the weights of a model."""
    _, params, buffers = split(model)
    return {'params': params, 'buffers': buffers}


def check_round_trip(model):
    """Compares a model with what its config.gin and its exported tensors give, to the bit."""
    weights = weights_of(model)
    again = from_tensors(to_tensors(weights), ModelFunctions(model.config, jnp.float32).abstract, 'export')
    jax.tree.map(np.testing.assert_array_equal, again, weights)
    text = dump(lm.Experiment(model=model.config))
    assert lm.configure([], text.splitlines()[2:]).model == model.config


@pytest.mark.parametrize('form', checkpoints.FORMS)
def test_a_family_gives_the_logits_the_loss_and_the_text_of_transformers(form, tmp_path):
    recorded = checkpoints.load(form)
    checkpoints.write(recorded, tmp_path / 'checkpoint', parts=1 + len(form) % 2)
    model = read(tmp_path / 'checkpoint')
    check_round_trip(model)
    tokens, expected = np.array([recorded['tokens']]), np.array(recorded['logits'])
    found = np.asarray(logits(model, tokens))[0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    normal = found - np.log(np.exp(found.astype(np.float64)).sum(-1, keepdims=True))
    loss = -np.take_along_axis(normal[:-1], tokens[0, 1:, None], -1).mean()
    assert loss == pytest.approx(recorded['loss'], rel=1e-5)
    decoded = np.asarray(decode(model, tokens))[0]
    np.testing.assert_allclose(decoded, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert decoded[checkpoints.PROMPT - 1 : -1].argmax(-1).tolist() == recorded['tokens'][checkpoints.PROMPT :]


def test_every_family_has_a_recorded_checkpoint():
    recorded = {checkpoints.load(form)['config']['model_type'] for form in checkpoints.FORMS}
    assert recorded == set(FAMILIES) - {'lm_tpu'}
    assert {path.stem for path in checkpoints.FOLDER.iterdir()} == set(checkpoints.FORMS)


def test_the_documented_table_has_every_family():
    """The page says that this module compares each of them."""
    page = (tiny.ROOT / 'docs' / 'how_to' / 'weights.md').read_text()
    _, _, *rows = page[page.index('| `model_type` |') :].split('\n\n')[0].splitlines()
    found = [name for row in rows for name in re.findall(r'`([a-z0-9_]+)`', row.split('|')[1])]
    assert sorted(found) == sorted(set(FAMILIES) - {'lm_tpu'})


def old_form(config: dict) -> dict:
    """Returns a config.json as transformers 4 writes it."""
    config = copy.deepcopy(config)
    rope = config.pop('rope_parameters')
    if 'full_attention' in rope:
        config['rope_local_base_freq'] = rope['sliding_attention']['rope_theta']
        rope = rope['full_attention']
    config |= {name: rope.pop(name) for name in ('rope_theta', 'partial_rotary_factor') if name in rope}
    config['torch_dtype'] = 'float32'
    kind = rope.pop('rope_type')
    config['rope_scaling'] = None if kind == 'default' else {'type': kind, **rope}
    if config['model_type'].startswith('qwen'):
        config.pop('layer_types', None)
    return config


OLDER = [
    form for form in checkpoints.FORMS if form not in ('gpt2', 'gemma3_vision', 'kimi_linear', *checkpoints.RECURRENT)
]


@pytest.mark.parametrize('form', OLDER)
def test_files_of_older_versions_say_the_same(form, tmp_path):
    config = checkpoints.load(form)['config']
    family = FAMILIES[config['model_type']]
    old = Hyperparameters(old_form(config))
    assert family.model(tmp_path, old) == family.model(tmp_path, Hyperparameters(config))
    assert family.differences(old) == []


def test_published_files_of_kimi_linear_say_the_same(tmp_path):
    """Their config.json counts layers from 1, and has a section for Kimi delta attention."""
    config = Hyperparameters(checkpoints.load('kimi_linear')['config'])
    family = FAMILIES['kimi_linear']
    published = {name: value for name, value in config.items() if not name.startswith(('linear_', 'layer_', 'mlp_'))}
    published['linear_attn_config'] = {
        'full_attn_layers': [5], 'kda_layers': [1, 2, 3, 4], 'num_heads': 4, 'head_dim': 8, 'short_conv_kernel_size': 4
    }  # fmt: skip
    published |= {'first_k_dense_replace': 1, 'mla_use_nope': True, 'moe_router_activation_func': 'sigmoid'}
    published = Hyperparameters(published)
    assert family.differences(published) == []
    assert family.model(tmp_path, published) == family.model(tmp_path, config)
    assert family.context_length(published) == 64


def test_defaults_are_those_of_transformers(tmp_path):
    """Files may leave out what has its default value."""
    for form in checkpoints.FORMS:
        config = checkpoints.load(form)['config']
        family = FAMILIES[config['model_type']]
        kept = ('vocab_size', 'hidden_size', 'num_hidden_layers', 'num_attention_heads', 'intermediate_size')
        small = {name: config[name] for name in kept if name in config}
        if 'hidden_size' in small:
            model = family.model(tmp_path, Hyperparameters(small | {'head_dim': 8}))
            wide = ('olmo', 'kimi', 'mixtral', 'phi3', 'starcoder2')
            epsilon = 1e-5 if config['model_type'].startswith(wide) else 1e-6
            assert model.norm_epsilon == epsilon, form
            assert model.tied == config['model_type'].startswith(('gemma', 'smol', 'starcoder')), form
    assert RotaryEntry(Hyperparameters(), 500.0).base == 500.0


@pytest.mark.parametrize(('form', 'format_name'), [('qwen2', 'safetensors'), ('kda', 'native')])
def test_an_import_keeps_every_bit_on_its_way_out_and_back(form, format_name, tmp_path, capsys):
    recorded = checkpoints.load(form)
    checkpoints.write(recorded, tmp_path / form, parts=3)
    run, out, back = (tmp_path / name for name in ('run', 'out', 'back'))
    length = ['--gin_param', 'train.context_length = 24', '--gin_param', 'train.tokens_per_step = 48']
    task = ['--gin_param', 'data.task = @induction_heads()']
    assert main(['import', str(tmp_path / form), '--run_dir', str(run), *length, *task]) == 0
    assert main(['export', '--run_dir', str(run), '--format', format_name, '--out', str(out)]) == 0
    assert ('\nimport fla' in (out / 'README.md').read_text()) == (format_name == 'native')
    assert main(['import', str(out), '--run_dir', str(back), *task]) == 0
    before, after = lm.load(str(run)), lm.load(str(back))
    assert after.experiment.model == before.experiment.model
    assert after.experiment.train.context_length == 24
    jax.tree.map(np.testing.assert_array_equal, before.weights, after.weights)


@pytest.mark.parametrize('form', ['llama', 'gpt2', 'gemma3_vision'])
def test_the_context_length_survives(form, tmp_path):
    """It comes with a checkpoint, goes out with either export and comes back; a value that is given wins."""
    recorded = checkpoints.load(form)
    checkpoints.write(recorded, tmp_path / 'checkpoint')
    length = {'gpt2': 32}.get(form, 64)
    given = load_given(str(tmp_path / 'checkpoint'), [], [])
    assert given.train.context_length == length
    assert given.train.tokens_per_step == 2**20
    shorter = load_given(str(tmp_path / 'checkpoint'), [], ['train.context_length = 16'])
    assert shorter.train.context_length == 16
    model = read(tmp_path / 'checkpoint')
    run = shapes.run_of(shapes.experiment(Softmax()), weights_of(model))
    train = dataclasses.replace(run.experiment.train, context_length=24, tokens_per_step=48)
    run.experiment = dataclasses.replace(run.experiment, model=model.config, train=train)
    for name, format in {'ours': FORMATS['huggingface'], 'native': NativeFormat()}.items():
        if (form, name) != ('gpt2', 'native'):
            (tmp_path / name).mkdir()
            format.write(run, tmp_path / name)
            assert load_given(str(tmp_path / name), [], []).train.context_length == 24
            config = json.loads((tmp_path / name / 'config.json').read_text())
            assert config['max_position_embeddings'] == 24


def test_a_checkpoint_that_lacks_something_is_refused(tmp_path, capsys):
    recorded = checkpoints.load('llama')
    tensors = checkpoints.write(recorded, tmp_path / 'llama')
    command = ['import', str(tmp_path / 'llama'), '--run_dir', str(tmp_path / 'run')]
    save_file(
        {k: v for k, v in tensors.items() if 'layers.1.mlp.up' not in k}, tmp_path / 'llama' / 'model.safetensors'
    )
    assert main(command) == 44
    assert "lacks the tensor 'model.layers.1.mlp.up_proj.weight'" in capsys.readouterr().err
    save_file(tensors | {'model.layers.1.more': np.zeros(1)}, tmp_path / 'llama' / 'model.safetensors')
    assert main(command) == 2
    assert 'a model that no model here equals: it has model.layers.1.more' in capsys.readouterr().err
    config = {name: value for name, value in recorded['config'].items() if name != 'hidden_size'}
    (tmp_path / 'llama' / 'config.json').write_text(json.dumps(config))
    assert main(command) == 44
    assert "config.json: lacks 'hidden_size'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ('form', 'changes', 'said'),
    [
        ('llama', {'rms_norm_eps': None}, 'config.json: has a value of another kind'),
        ('llama', {'rope_parameters': [1]}, 'config.json: has a value of another kind'),
    ],
)
def test_a_value_of_another_kind_is_one_line(form, changes, said, tmp_path, capsys):
    checkpoints.write(checkpoints.load(form), tmp_path / 'there')
    config = json.loads((tmp_path / 'there' / 'config.json').read_text())
    (tmp_path / 'there' / 'config.json').write_text(json.dumps(config | changes))
    assert main(['import', str(tmp_path / 'there'), '--run_dir', str(tmp_path / 'run')]) == 44
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line


def test_a_width_that_config_json_leaves_open_is_that_of_the_classes(tmp_path):
    recorded = checkpoints.load('gla')
    models = [FAMILIES['gla'].model(tmp_path, Hyperparameters(recorded['config'] | given)) for given in (
        {'hidden_ratio': 4, 'intermediate_size': None}, {'hidden_ratio': None, 'intermediate_size': None},
    )]  # fmt: skip
    assert models[0].glu_dim == models[1].glu_dim


def test_the_old_form_of_rotary_positions_wins(tmp_path):
    """So does `transformers`; whoever adds a scaling by hand writes the old form beside the new one."""
    yarn = {'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 16}
    config = Hyperparameters({'rope_parameters': {'rope_type': 'default', 'rope_theta': 1e4}, 'rope_scaling': yarn})
    found = RotaryEntry(config, 10_000.0)
    assert (found.kind, found.base, found.scaling.length) == ('yarn', 1e4, 16)
    assert RotaryEntry(config | {'original_max_position_embeddings': 32}, 10_000.0).scaling.length == 32


@pytest.mark.parametrize('form', ['gemma', 'gpt2'])
def test_an_output_matrix_beside_tied_embeddings_must_equal_them(form, tmp_path, capsys):
    tensors = checkpoints.write(checkpoints.load(form), tmp_path / 'there')
    (embedding,) = (name for name in tensors if name.endswith(('embed_tokens.weight', 'wte.weight')))
    others = {name: tensor for name, tensor in tensors.items() if name != 'lm_head.weight'}
    path, command = tmp_path / 'there' / 'model.safetensors', ['import', str(tmp_path / 'there'), '--run_dir']
    for name, given, code in (
        ('equal', others | {'lm_head.weight': tensors[embedding]}, 0),
        ('alone', {n: t for n, t in others.items() if n != embedding} | {'lm_head.weight': tensors[embedding]}, 0),
        ('other', others | {'lm_head.weight': tensors[embedding] + 1}, 44),
    ):
        if name == 'alone' and form == 'gpt2':
            continue  # the names of its other tensors depend on this one
        save_file(given, path)
        assert main([*command, str(tmp_path / name)]) == code, name
    assert "'lm_head.weight': differs from" in capsys.readouterr().err


def test_gemma_goes_out_as_transformers_reads_it():
    """Its classes need the size of a window where no layer has one, and Gemma 3 has no cap of scores."""
    shape = shapes.GEMMA | {'activation': 'gelu', 'tied': True, 'sinusoids': False, 'rotary_base': 1e4}
    shape |= {'qkv_biases': False, 'embedding_scale': None}
    model = shapes.experiment(Softmax(), **shape).model
    family = find_family(model)
    assert family.architecture == 'Gemma2ForCausalLM'
    described = family.describe(model)
    assert described['sliding_window'] > 0
    assert set(described['layer_types']) == {'full_attention'}
    capped = shapes.experiment(Softmax(score_cap=5.0), **shape | {'qk_norm': True}).model
    with pytest.raises(ConfigError, match='no class of transformers'):
        find_family(capped)


REFUSED = [
    ('llama', {'rope_scaling': {'rope_type': 'longrope', 'factor': 4}}, "rotary positions scaled by 'longrope'"),
    ('llama', {'partial_rotary_factor': 0.5}, 'rotary positions on a part of a head'),
    ('llama', {'rope_scaling': {'type': 'yarn', 'factor': 4, 'mscale': 1.0}}, 'rotary positions with mscale'),
    ('mistral', {'attention_bias': True}, 'biases in attention'),
    ('mistral', {'mlp_bias': True}, 'biases in the linear units'),
    ('qwen2_moe', {'qkv_bias': False}, 'no biases of queries, keys and values'),
    ('qwen3_moe', {'use_sliding_window': True}, 'a sliding window'),
    ('olmoe', {'clip_qkv': 8.0}, 'a limit of queries, keys and values'),
    ('phi3', {'rope_scaling': {'type': 'longrope'}}, "rotary positions scaled by 'longrope'"),
    ('starcoder2', {'use_bias': False}, 'layer normalization without biases of maps'),
    ('llama', {'hidden_act': 'relu'}, "hidden_act = 'relu'"),
    ('llama', {'quantization_config': {}}, 'quantized weights'),
    ('qwen3', {'layer_types': ['linear_attention'] * 2}, 'layers of type linear_attention'),
    ('gemma', {'use_bidirectional_attention': True}, 'tokens that see later ones'),
    ('qwen3_next', {'layer_types': ['sliding_attention'] * 4}, 'layers of type sliding_attention'),
    ('kimi_linear', {'q_lora_rank': 8}, 'queries of low rank'),
    ('kimi_linear', {'mla_use_nope': False}, 'rotary positions'),
    ('kimi_linear', {'moe_router_activation_func': 'softmax'}, 'softmax in the router'),
    ('kimi_linear', {'num_key_value_heads': 2}, 'fewer keys than queries'),
    ('gla', {'clamp_min': -5.0}, 'clamp_min = -5.0'),
    ('gla', {'attn': {'layers': [1], 'num_heads': 4}}, "attn = {'layers': [1]"),
    ('gla', {'hidden_act': 'powlu'}, "hidden_act = 'powlu'"),
    ('retnet', {'num_kv_heads': 2}, 'fewer keys than queries'),
    ('delta_net', {'qk_norm': 'sum'}, "qk_norm = 'sum'"),
    ('gated_deltanet', {'use_short_conv': False}, 'use_short_conv = False'),
    ('kda', {'safe_gate': True}, 'safe_gate = True'),
    ('kda', {'expand_v': 2.0}, 'expand_v = 2.0'),
]


@pytest.mark.parametrize(
    ('changes', 'said'),
    [
        ({'model_type': 'llama4'}, 'The nearest is llama; what differs: nothing that config.json says'),
        ({'model_type': 'phi4', 'hidden_act': 'relu'}, "The nearest is phi3; what differs: hidden_act = 'relu'"),
        ({'model_type': 'qwen3_mo', 'sliding_window': []}, 'The nearest is qwen3_moe; what differs: '),
        ({'model_type': 'bert'}, 'starcoder2$'),
    ],
)
def test_a_refusal_names_the_nearest_family(changes, said):
    config = Hyperparameters(checkpoints.load('llama')['config'] | changes)
    with pytest.raises(ConfigError, match=said):
        choose(config, 'x')


@pytest.mark.parametrize(('form', 'changes', 'said'), REFUSED)
def test_what_no_model_here_computes_is_refused_by_name(form, changes, said, tmp_path, capsys):
    config = {k: v for k, v in checkpoints.load(form)['config'].items() if k != 'rope_parameters'}
    (tmp_path / 'config.json').write_text(json.dumps(config | changes))
    assert main(['import', str(tmp_path), '--run_dir', str(tmp_path / 'run')]) == 2
    printed = capsys.readouterr().err
    assert len(printed.strip().splitlines()) == 1
    assert re.search(f'a {form} model that no model here equals: it has .*{re.escape(said)}', printed)
    assert not (tmp_path / 'run').exists()


def test_the_pattern_is_the_shortest_that_gives_all_layers():
    assert find_pattern('aaaa') == 'a'
    assert find_pattern('abab') == ('a', 'b')
    assert find_pattern('aabaab') == ('a', 'a', 'b')
    assert find_pattern('aabaa') == ('a', 'a', 'b')  # the last repeat is cut
    assert find_pattern('aabbb') == tuple('aabbb')


IN_OTHER_TENSORS = ('phi3', 'granite', 'llama_attention_biases')
"""Forms whose matrices are joined in files, take over factors, or get biases of zeros."""
NATIVE = [form for form in checkpoints.FORMS if form not in ('gpt2', 'gemma3_vision', *IN_OTHER_TENSORS)]


@pytest.mark.parametrize('form', NATIVE)
def test_an_imported_model_goes_out_as_it_came_in(form, tmp_path):
    """`--format native` gives the same config.json, as far as it counts, and the same tensors."""
    recorded = checkpoints.load(form)
    theirs = checkpoints.write(recorded, tmp_path / 'checkpoint')
    model = read(tmp_path / 'checkpoint')
    run = shapes.run_of(shapes.experiment(Softmax()), weights_of(model))
    run.experiment = dataclasses.replace(run.experiment, model=model.config)
    NativeFormat().check(model.config)
    (tmp_path / 'out').mkdir()
    NativeFormat().write(run, tmp_path / 'out')
    again = load_file(tmp_path / 'out' / 'model.safetensors')
    assert again.keys() == theirs.keys()
    bits = 2e-7 if recorded['config']['model_type'].startswith(checkpoints.CENTRED) else 0.0  # gains of 1 + w
    for name, tensor in theirs.items():
        np.testing.assert_allclose(again[name], tensor, rtol=0, atol=bits, err_msg=name)
    config = open_checkpoint(tmp_path / 'out').config
    family = choose(config, tmp_path / 'out')
    found = family.model(tmp_path, config)
    assert dataclasses.replace(found, embedding_scale=None) == dataclasses.replace(model.config, embedding_scale=None)
    assert family.context_length(config) == run.experiment.train.context_length


def test_a_hybrid_of_our_own_goes_out_as_qwen3_next(tmp_path):
    """Three layers of Gated DeltaNet per layer of softmax, with options of the mechanisms and of the model."""
    delta = find_layer_type('linear_attention')(
        gate=True, convolution=4, rotary_base=None, output_gate=True, output_gate_form='silu'
    )
    pattern = (delta,) * 3 + (
        Softmax(qk_norm=True, output_gate=True, output_gate_form='sigmoid', n_heads=2, n_kv_heads=1, head_dim=16),
    )
    changes = shapes.LLAMA | {
        'norm_epsilon': 1e-5,
        'feed_forward': Experts(n_experts=4, shared_dim=8, shared_gate=True),
    }
    config = shapes.experiment(pattern, **changes | {'n_kv_heads': 4})
    weights = shapes.random_weights(config)
    NativeFormat().write(shapes.run_of(config, weights), tmp_path)
    described = json.loads((tmp_path / 'config.json').read_text())
    assert described['architectures'] == ['Qwen3NextForCausalLM']
    assert (described['num_attention_heads'], described['linear_num_key_heads']) == (2, 4)
    tokens = np.random.default_rng(1).integers(0, 97, (1, 24))
    ours = shapes.our_logits(config, weights, tokens)
    np.testing.assert_allclose(logits(read(tmp_path), tokens), ours, rtol=0, atol=1e-5 * np.abs(ours).max())
    plain = dataclasses.replace(config.model, feed_forward=Experts(n_experts=4))  # without a shared expert
    with pytest.raises(
        ConfigError, match=r'layer 0: feed_forward = Experts\(n_experts=4, .*: no class of transformers'
    ):
        NativeFormat().check(plain)


@pytest.mark.parametrize(('form', 'default'), [('qwen3_next', 0.001), ('kimi_linear', 0.0)])
def test_the_coefficient_of_the_balance_loss_stays(form, default, tmp_path):
    """Older files leave it out, and null stands for none."""
    config = checkpoints.load(form)['config']
    family, name = FAMILIES[form], 'router_aux_loss_coef'
    model = family.model(tmp_path, Hyperparameters(config | {name: 0.02}))
    assert {kind.balance for kind in model.feed_forwards if isinstance(kind, Experts)} == {0.02}
    assert family.describe(model)[name] == 0.02
    assert family.model(tmp_path, Hyperparameters(family.describe(model))).feed_forward == model.feed_forward
    for others, expected in (({}, default), ({name: None}, 0.0)):
        kept = {key: one for key, one in config.items() if key != name}
        read_again = family.model(tmp_path, Hyperparameters(kept | others))
        assert {kind.balance for kind in read_again.feed_forwards if isinstance(kind, Experts)} == {expected}


@pytest.mark.parametrize('form', ['qwen3_next', 'kimi_linear'])
def test_one_expert_with_the_weight_1_is_imported_as_it_is(form, tmp_path):
    """Published classes divide its score by itself. Training alone refuses it."""
    one = {'num_experts_per_tok': 1, 'num_experts_per_token': 1}
    model = FAMILIES[form].model(tmp_path, Hyperparameters(checkpoints.load(form)['config'] | one))
    kinds = [kind for kind in model.feed_forwards if isinstance(kind, Experts)]
    assert {(kind.top_k, kind.normalize) for kind in kinds} == {(1, True)}


DELTA, GATED, RETENTION = map(find_layer_type, ('linear_attention', 'gated_linear_attention', 'multi_scale_retention'))
PLAIN = shapes.LLAMA | {'rotary_base': None, 'n_kv_heads': 4}
LINEAR = {
    'gla': ('GLAForCausalLM', GATED(gate='channel'), {'n_kv_heads': 2, 'value_dim': 12, 'output_gate': True}),
    'gla plain': ('GLAForCausalLM', GATED(gate='channel'), {'convolution': 3, 'tied': True}),
    'retnet': ('RetNetForCausalLM', RETENTION(), {'output_gate': True, 'rotary_base': 10_000.0}),
    'delta': ('DeltaNetForCausalLM', DELTA(negative=True), {'convolution': 4}),
    'gated delta': (
        'GatedDeltaNetForCausalLM', DELTA(gate=True), {'convolution': 4, 'n_value_heads': 8, 'output_gate': True}
    ),
    'kda': (
        'KDAForCausalLM',
        DELTA(gate='channel'),
        {'convolution': 4, 'output_gate': True, 'output_gate_form': 'sigmoid', 'output_gate_rank': 8},
    ),
}  # fmt: skip


@pytest.mark.parametrize('form', LINEAR)
def test_a_linear_model_goes_out_as_a_class_of_flash_linear_attention(form, tmp_path):
    architecture, mechanism, changes = LINEAR[form]
    config = shapes.experiment(mechanism, **PLAIN | changes)
    weights = shapes.random_weights(config)
    assert 'import fla' in NativeFormat().find_imports(config.model)
    NativeFormat().write(shapes.run_of(config, weights), tmp_path)
    assert json.loads((tmp_path / 'config.json').read_text())['architectures'] == [architecture]
    model = read(tmp_path)
    if not config.model.tied:  # else the scale of the embeddings is in the last normalization
        back = to_tensors(weights_of(model))
        for name, tensor in to_tensors(weights).items():
            if name != 'embedding.weight':
                np.testing.assert_array_equal(back[name], tensor)
    tokens = np.random.default_rng(1).integers(0, 97, (1, 24))
    ours = shapes.our_logits(config, weights, tokens)
    np.testing.assert_allclose(logits(model, tokens), ours, rtol=0, atol=1e-5 * np.abs(ours).max())


def test_biases_of_an_output_gate_are_refused_by_name(tmp_path, capsys):
    tensors = checkpoints.write(checkpoints.load('kda'), tmp_path / 'kda')
    bias = f'model.layers.1.attn.{checkpoints.WITHOUT_BIAS}'
    save_file(tensors | {bias: np.ones_like(tensors[bias])}, tmp_path / 'kda' / 'model.safetensors')
    assert main(['import', str(tmp_path / 'kda'), '--run_dir', str(tmp_path / 'run')]) == 2
    assert f'a model that no model here equals: it has {bias}' in capsys.readouterr().err


@pytest.mark.parametrize('tied', [False, True])
def test_a_model_of_our_own_goes_out_as_a_llama(tied, tmp_path):
    config = shapes.experiment(Softmax(), **shapes.LLAMA | {'tied': tied})
    weights = shapes.random_weights(config)
    NativeFormat().write(shapes.run_of(config, weights), tmp_path)
    assert json.loads((tmp_path / 'config.json').read_text())['architectures'] == ['LlamaForCausalLM']
    tokens = np.random.default_rng(1).integers(0, 97, (1, 24))
    ours = shapes.our_logits(config, weights, tokens)
    np.testing.assert_allclose(logits(read(tmp_path), tokens), ours, rtol=0, atol=1e-5 * np.abs(ours).max())


@pytest.mark.parametrize(
    ('attention', 'changes', 'said'),
    [
        (
            Softmax(),
            {'norm': 'layer'},
            "model.norm = 'layer': no class of transformers .* LlamaForCausalLM is the nearest",
        ),
        (Hybrid(), {}, r'layer 0: attention = @hybrid\(\)'),
        (Softmax(gate=True), {}, r"layer 0: attention = @softmax\(\) with \{'gate': True"),
        (Softmax(), {'learned_positions': 32}, 'model.learned_positions = 32: no class'),
        (Softmax(), {'output_gate': True}, 'layer 0: output_gate = True: no class'),
        (GATED(gate='ssd'), PLAIN, r"'gate': 'ssd'.*, GLAForCausalLM is the nearest; export with --format huggingface"),
        (RETENTION(), {'n_kv_heads': 2}, 'layer 0: n_kv_heads = 2: .*, RetNetForCausalLM is the nearest'),
        (DELTA(), PLAIN, 'layer 0: convolution = None: .*, DeltaNetForCausalLM is the nearest'),
    ],
)
def test_a_model_that_no_class_of_transformers_computes_is_refused(attention, changes, said):
    with pytest.raises(ConfigError, match=said):
        NativeFormat().check(shapes.experiment(attention, **shapes.LLAMA | changes).model)
