"""Export and import of weights with `transformers` itself; needs PyTorch: `scripts/test.sh -m interop`."""

import dataclasses
import json

import checkpoints
import jax
import numpy as np
import pytest
import recurrent_classes
import shapes
import test_families
from mechanisms_list import MECHANISMS

from lm.attention.hybrid import Hybrid
from lm.attention.llops import Llops
from lm.attention.performer import Performer
from lm.attention.polynomial import Polynomial
from lm.attention.polysketch import Polysketch
from lm.attention.recurrent.delta import Delta
from lm.attention.recurrent.gated_linear import GatedLinear
from lm.attention.recurrent.retention import Retention
from lm.attention.rotary_scaling import LinearRotary, YarnRotary
from lm.attention.softmax import Softmax
from lm.checkpoint.checkpointer import Checkpointer
from lm.cli import main
from lm.experiment import load
from lm.inference.decoding import Sampling, generate_tokens
from lm.interop.families import FAMILIES
from lm.interop.formats import FORMATS
from lm.interop.hyperparameters import Hyperparameters
from lm.interop.native import NativeFormat
from lm.model.functions import ModelFunctions

pytestmark = pytest.mark.interop
torch = pytest.importorskip('torch', reason='needs PyTorch: scripts/test.sh -m interop')
transformers = pytest.importorskip('transformers', reason='needs transformers: scripts/test.sh -m interop')

MORE = {
    'softmax scale': Softmax(scale=0.7),
    'softmax yarn on a part': Softmax(rotary_fraction=0.5, rotary_scaling=YarnRotary(attention_factor=1.5)),
    'softmax sinks gate': Softmax(sinks=True, gate=True, window=9),
    'layers of their own': (
        Softmax(rotary_base=None, window=5),
        Softmax(rotary_base=100.0, rotary_scaling=LinearRotary(factor=2.0), n_heads=6, n_kv_heads=3, head_dim=4),
        Polynomial(qk_norm=True, output_norm=True, key_offset=0.5, output_gate=True,
                   output_gate_form='sigmoid', output_gate_inputs=0.5),
        Delta(convolution=3, rotary_base=None, n_kv_heads=1),
    ),
    'wide values': (
        Delta(gate='channel', n_heads=2, n_kv_heads=2, n_value_heads=4, value_dim=12, convolution=3),
        Softmax(n_heads=2, n_kv_heads=1, n_value_heads=4, value_dim=6, qk_norm=True, output_norm=True),
        GatedLinear(gate='ssd', n_heads=1, n_kv_heads=1, n_value_heads=4, value_dim=12, output_gate=True,
                    output_gate_form='silu', output_gate_rank=3),
        Retention(value_dim=4, key_offset=0.5),
    ),
    'polysketch learned 8': Polysketch(sketch='learned', sketch_size=4, degree=8, block=8, per_head=True),
    'polysketch narrow networks': Polysketch(sketch_size=4, degree=8, block=8, network_width=2),
    'polysketch 2': Polysketch(degree=2, block=8),
    'polysketch published': Polysketch(
        sketch='gaussian', sketch_size=8, block=8, far_factor='published', sketch_norm='tied'
    ),
    'polysketch own norm': Polysketch(sketch_size=8, block=8, sketch_norm='tied', far_factor=0.1),
    'polysketch mean': Polysketch(
        sketch='gaussian', sketch_size=4, block=8, sketches=2, sketch_norm='separate', far_factor='mean',
        learn_far_factor=True,
    ),
    'polysketch 16': Polysketch(degree=16, sketch_size=4, block=8),
    'polynomial 16': Polynomial(degree=16),
    'polynomial tied': Polynomial(score_norm='tied'),
    'polysketch srht local': Polysketch(sketch='srht', sketch_size=8, block=8),
    'hybrid parts': Hybrid(window=5, degree=3, parts=2, approximation='minimax'),
    'hybrid long window': Hybrid(window=64),
    'llops signed': Llops(n_features=16, nonnegative=False, affine=True, rank=2, layer_norm=False),
    'performer sums': Performer(n_features=16, renormalize=False),
    'performer both ways': Performer(n_features=16, causal=False),
    **{f'performer {kind}': Performer(n_features=32, features=kind, block=8) for kind in
       ('hyperbolic', 'trigonometric', 'random_phases', 'gelu', 'exp')},
}  # fmt: skip
FORMS = MECHANISMS | MORE
SIGNED = dict.fromkeys(('performer trigonometric', 'performer random_phases', 'llops signed'), 1e-4)
SIGNED['performer gelu'] = 1e-2
"""Mechanism with signed weights → the fraction of the largest logit to which two programs agree."""


def check_equal(ours, theirs, tolerance=1e-5):
    """Compares to a fraction of the largest logit."""
    assert np.isfinite(ours).all()
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=tolerance * np.abs(ours).max())


@pytest.fixture
def tokens():
    return np.random.default_rng(1).integers(0, 97, (2, 24))


@pytest.mark.parametrize('form', FORMS)
def test_transformers_computes_the_same(form, tmp_path, tokens):
    others = {'hybrid long window': shapes.GPT2, 'softmax window': {'logit_cap': 2.0, 'rotary_fraction': 0.5}}
    families = {'softmax scale': shapes.LLAMA, 'polynomial 16': shapes.GEMMA, 'polysketch 16': shapes.OLMO}
    blocks = {'delta gate': shapes.BLOCK, 'gated_linear ssd': shapes.BLOCK, 'polysketch gate': shapes.HEADS}
    changes = (families | others | blocks).get(form, {})
    config = shapes.experiment(FORMS[form], **changes)
    weights = shapes.random_weights(config)
    FORMATS['huggingface'].check(config.model)
    FORMATS['huggingface'].write(shapes.run_of(config, weights), tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True).eval()
    with torch.no_grad():
        result = model(torch.tensor(tokens), labels=torch.tensor(tokens))
    ours = shapes.our_logits(config, weights, tokens)
    # Sums of signed weights come near zero. Divisions by them amplify rounding errors, and the two programs round
    # differently.
    check_equal(ours, result.logits.numpy(), SIGNED.get(form, 1e-5))
    if form == 'softmax':
        normal = ours - np.log(np.exp(ours).sum(-1, keepdims=True))
        expected = -np.take_along_axis(normal[:, :-1], tokens[:, 1:, None], axis=-1).mean()
        assert result.loss.item() == pytest.approx(expected, rel=1e-5)
        written = model.generate(torch.tensor(tokens[:, :8]), max_new_tokens=4, do_sample=False)
        first = shapes.our_logits(config, weights, tokens[:, :8])[:, -1].argmax(-1)
        np.testing.assert_array_equal(written[:, 8].numpy(), first)


def test_an_amplitude_leaves_channels_that_do_not_turn_as_they_are():
    from lm.interop.parts.positions import rotate  # needs PyTorch

    x = torch.tensor(np.random.default_rng(0).normal(size=(2, 5, 3, 8)), dtype=torch.float32)
    described = {'base': 1e4, 'frequencies': [1.0, 0.1, 0.0, 0.0], 'amplitude': 1.5}
    y = rotate(x, described, torch.arange(5).expand(2, 5)).view(2, 5, 3, 2, 4)
    x = x.view(2, 5, 3, 2, 4)
    assert torch.equal(y[..., 2:], x[..., 2:])
    torch.testing.assert_close(y[..., :2].square().sum(3), 2.25 * x[..., :2].square().sum(3))


def load_export(form, tmp_path, **changes):
    """Returns the model of `transformers` from an export with random weights."""
    config = shapes.experiment(FORMS[form], **changes)
    FORMATS['huggingface'].write(shapes.run_of(config, shapes.random_weights(config)), tmp_path)
    return transformers.AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True).eval()


@pytest.mark.parametrize('form', ['performer', 'polysketch learned local', 'gated_linear channel'])
def test_what_transformers_writes_comes_back(form, tmp_path, tokens):
    config = shapes.experiment(FORMS[form])
    weights = shapes.random_weights(config)
    FORMATS['huggingface'].write(shapes.run_of(config, weights), tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    model.save_pretrained(tmp_path / 'saved')
    back = test_families.read(tmp_path / 'saved')
    assert back.config == config.model
    jax.tree.map(np.testing.assert_array_equal, test_families.weights_of(back), weights)


OPTIONS = {'delta gate': shapes.BLOCK, 'polysketch gate': shapes.HEADS, 'softmax': shapes.GPT2}
CUTS = [9, 1, 1, 6, 7]
"""Tokens per call: a prompt, single tokens, and pieces longer than a window or a block."""
CAUSAL = [form for form in FORMS if form != 'performer both ways']
BITS = {'llops signed': 1e-2, 'performer gelu': 1e-1, 'performer trigonometric': 1e-2, 'performer random_phases': 1e-2}


@pytest.mark.parametrize('form', CAUSAL)
def test_a_cache_and_padding_on_the_left_change_nothing(form, tmp_path, tokens):
    model, tokens = load_export(form, tmp_path, **OPTIONS.get(form, {})), torch.tensor(tokens)
    padding = 7
    mask = torch.ones_like(tokens)
    mask[1, :padding] = 0
    with torch.no_grad():
        whole = model(tokens).logits
        cache, parts, sizes = None, [], []
        for piece in tokens.split(CUTS, dim=1):
            result = model(piece, use_cache=True, cache=cache)
            cache = result.cache
            parts.append(result.logits)
            sizes.append(sum(x.numel() for layer in cache.layers for x in layer.values()))
        check_equal(whole.numpy(), torch.cat(parts, dim=1).numpy(), BITS.get(form, 2e-5))
        shifted = torch.cat([tokens[1, :padding], tokens[1, :-padding]])  # what stands in the padding does not count
        batch, cache, parts = torch.stack([tokens[0], shifted]), None, []
        for piece, end in zip(batch.split(CUTS, dim=1), np.cumsum(CUTS), strict=True):
            result = model(piece, attention_mask=mask[:, :end], use_cache=True, cache=cache)
            cache = result.cache
            parts.append(result.logits)
        found = torch.cat(parts, dim=1)
        check_equal(whole[0].numpy(), found[0].numpy(), BITS.get(form, 2e-5))
        check_equal(whole[1, :-padding].numpy(), found[1, padding:].numpy(), BITS.get(form, 2e-5))
        check_equal(model(batch, attention_mask=mask).logits[1, padding:].numpy(), found[1, padding:].numpy(),
                    BITS.get(form, 2e-5))  # fmt: skip
    grows = any(keeps_all_keys(one) for one in (FORMS[form] if isinstance(FORMS[form], tuple) else (FORMS[form],)))
    assert (sizes[-1] > sizes[-2]) == grows


def keeps_all_keys(mechanism) -> bool:
    """Tells whether the cache of a mechanism grows with the text; others keep sums, and keys of a window or block."""
    kind = mechanism.gin_name
    if kind == 'softmax':
        return mechanism.window is None
    return kind in ('polynomial', 'hybrid') or (kind == 'gated_linear' and mechanism.degree > 1)


WRITING = ('softmax', 'softmax window', 'retention', 'delta gate', 'polysketch learned local', 'hybrid', 'based')


@pytest.mark.parametrize('form', WRITING)
def test_generate_of_transformers_writes_what_lm_generate_writes(form, tmp_path, tokens):
    """Prompts of two lengths share a batch: here one by one where the shorter one ends, there padded on the left."""
    config = shapes.experiment(FORMS[form])
    weights = shapes.random_weights(config)
    FORMATS['huggingface'].write(shapes.run_of(config, weights), tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True).eval()
    prompts = [tokens[0, :12], tokens[1, :7]]
    ours = ModelFunctions(config.model, 'float32').merge(weights)
    made = np.concatenate(list(generate_tokens(ours, prompts, 10, Sampling(0.0), 0)), axis=1)
    expected = [row[len(prompt) - 1 :][:10].tolist() for row, prompt in zip(made, prompts, strict=True)]
    batch, mask = np.zeros((2, 12), int), np.zeros((2, 12), int)
    for i, prompt in enumerate(prompts):
        batch[i, 12 - len(prompt) :], mask[i, 12 - len(prompt) :] = prompt, 1
    given = {'attention_mask': torch.tensor(mask), 'max_new_tokens': 10}
    for options in ({}, {'use_cache': False}):
        written = model.generate(torch.tensor(batch), **given, do_sample=False, **options)
        assert written[:, 12:].tolist() == expected
    beams = [
        model.generate(torch.tensor(batch), **given, num_beams=3, do_sample=False, use_cache=cached).tolist()
        for cached in (True, False)
    ]
    assert beams[0] == beams[1]
    with pytest.raises(ValueError, match='has padding behind its text; pad on the left'):
        model(torch.tensor(batch), attention_mask=torch.tensor(mask[:, ::-1].copy()), use_cache=True)


@pytest.mark.parametrize('form', sorted(FORMS.keys() - SIGNED.keys()))
def test_half_the_bits_are_enough_to_load_a_model(form, tmp_path, tokens):
    """Attention stays in float32, because powers and sums need it."""
    config = shapes.experiment(FORMS[form])
    FORMATS['huggingface'].write(shapes.run_of(config, shapes.random_weights(config)), tmp_path)
    load_model = transformers.AutoModelForCausalLM.from_pretrained
    models = [load_model(tmp_path, trust_remote_code=True, dtype=d) for d in (torch.float32, torch.bfloat16)]
    whole, half = (model(torch.tensor(tokens)).logits for model in models)
    assert half.dtype == torch.bfloat16
    assert half.isfinite().all()
    assert (whole - half).abs().mean() < 0.1 * whole.abs().mean()
    half.float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in models[1].parameters() if p.requires_grad)


def use_class(folder, saved, tokens):
    """Does what `recurrent_classes.use` does, for classes that transformers has."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation='eager').eval()
    ids = torch.tensor([tokens])
    with torch.no_grad():
        logits = model(ids).logits[0]
        written = model.generate(ids[:, : checkpoints.PROMPT], max_new_tokens=checkpoints.WRITTEN, do_sample=False)
    model.save_pretrained(saved)  # transformers writes it again, and it comes back
    return {'class': type(model).__name__, 'logits': logits.tolist(), 'written': written[0].tolist()}


@pytest.mark.parametrize('form', checkpoints.FORMS)
def test_families_come_in_and_go_out(form, tmp_path):
    """The recorded arrays are what transformers computes today. The model in PyTorch of an export computes the same."""
    if form in checkpoints.RECURRENT:
        recurrent_classes.need_classes()
    recorded, today = checkpoints.load(form), checkpoints.compute(form)
    assert recorded['tokens'] == today['tokens']
    expected = np.array(recorded['logits'])
    check_equal(expected, np.array(today['logits']))
    checkpoints.write(today, tmp_path / 'checkpoint')
    run, length = tmp_path / 'run', ['--gin_param', 'train.context_length = 32']
    assert main(['import', str(tmp_path / 'checkpoint'), '--run_dir', str(run), *length]) == 0
    config = load([str(run / 'config.gin')])
    with Checkpointer(run / 'checkpoints') as saved:
        weights, _, _ = saved.restore(shapes.abstract_weights(config))
    tokens = np.array([recorded['tokens']])
    check_equal(shapes.our_logits(config, weights, tokens)[0], expected)
    (tmp_path / 'out').mkdir()
    task = dataclasses.replace(config, data=shapes.experiment(Softmax()).data)  # needs no tokenizer
    FORMATS['huggingface'].check(config.model)
    FORMATS['huggingface'].write(shapes.run_of(task, weights), tmp_path / 'out')
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'out', trust_remote_code=True).eval()
    with torch.no_grad():
        check_equal(expected, model(torch.tensor(tokens)).logits[0].numpy())
    if form == 'gpt2':
        return
    (tmp_path / 'native').mkdir()
    NativeFormat().write(shapes.run_of(task, weights), tmp_path / 'native')
    use = recurrent_classes.use if form in checkpoints.RECURRENT else use_class
    found = use(tmp_path / 'native', tmp_path / 'saved', recorded['tokens'])
    # An import leaves out a tower for pictures, and cuts joined matrices, so the class changes.
    if 'text_config' not in recorded['config'] and form != 'phi3':
        assert [found['class']] == recorded['config']['architectures']
    check_equal(expected, np.array(found['logits']))
    check_equal(expected, np.array(found.get('decoded', found['logits'])))
    assert found['written'] == recorded['tokens']
    saved = test_families.read(tmp_path / 'saved')
    check_equal(expected, np.asarray(test_families.logits(saved, tokens))[0])
    described = json.loads((tmp_path / 'saved' / 'config.json').read_text())
    assert FAMILIES[described['model_type']].context_length(Hyperparameters(described)) == 32


@pytest.mark.parametrize('qk_norm', [False, True])
def test_gemma_without_windows_goes_out(qk_norm, tmp_path, tokens):
    shape = shapes.GEMMA | {'activation': 'gelu', 'tied': True, 'sinusoids': False, 'rotary_base': 1e4}
    config = shapes.experiment(Softmax(), **shape | {'qkv_biases': False, 'embedding_scale': None, 'qk_norm': qk_norm})
    weights = shapes.random_weights(config)
    NativeFormat().write(shapes.run_of(config, weights), tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation='eager').eval()
    assert type(model).__name__ == ('Gemma3ForCausalLM' if qk_norm else 'Gemma2ForCausalLM')
    with torch.no_grad():
        check_equal(shapes.our_logits(config, weights, np.asarray(tokens)), model(torch.tensor(tokens)).logits.numpy())


@pytest.mark.parametrize('tied', [False, True])
def test_gpt2_is_imported_and_exported(tied, tmp_path, tokens):
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=32, n_inner=56, tie_word_embeddings=tied,
            initializer_range=0.3, bos_token_id=0, eos_token_id=0,
        )
    ).eval()  # fmt: skip
    with torch.no_grad():  # transformers initializes biases to 0 and gains to 1
        for name, parameter in theirs.named_parameters():
            if name.endswith('bias') or '.ln_' in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path / 'gpt2')
    run = tmp_path / 'run'
    length = ['--gin_param', 'train.context_length = 32']
    assert main(['import', str(tmp_path / 'gpt2'), '--run_dir', str(run), *length]) == 0
    config = load([str(run / 'config.gin')])
    with Checkpointer(run / 'checkpoints') as saved:
        weights, _, _ = saved.restore(shapes.abstract_weights(config))
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    check_equal(shapes.our_logits(config, weights, tokens), expected)
    out = tmp_path / 'out'
    out.mkdir()
    task = dataclasses.replace(config, data=shapes.experiment(Softmax()).data)  # needs no tokenizer
    FORMATS['huggingface'].write(shapes.run_of(task, weights), out)
    model = transformers.AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True).eval()
    with torch.no_grad():
        check_equal(expected, model(torch.tensor(tokens)).logits.numpy())
    with pytest.raises(ValueError, match=r'41 tokens per row, and the model has learned_positions = 32; give shorter'):
        model(torch.zeros(1, 41, dtype=torch.long))
