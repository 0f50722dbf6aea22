"""Export and import of weights without PyTorch: names, round trips to the bit, refusals."""

import ast
import collections
import contextlib
import dataclasses
import importlib
import json
import os
import re
import resource
import stat
import subprocess
import sys

import jax
import numpy as np
import pytest
import shapes
import tiny
from mechanisms_list import MECHANISMS
from safetensors.numpy import load_file, save_file

import lm
from lm.attention import mechanisms
from lm.attention.formulas.base import FORMULAS
from lm.attention.hybrid import Hybrid
from lm.attention.softmax import Softmax
from lm.cli import main
from lm.data.dataset import DataConfig
from lm.data.store import TokenStore
from lm.data.tokenizers import from_bytes
from lm.data.tokenizers.config import TokenizerConfig
from lm.data.tokenizers.sentencepiece import train
from lm.errors import ConfigError, MismatchError
from lm.interop.checkpoints import CheckpointFolder
from lm.interop.export_run import UNFINISHED, exporting
from lm.interop.formats import FORMATS, attention_source
from lm.interop.import_run import choose_tokenizers, load_given
from lm.interop.names import from_tensors, places, to_tensors
from lm.interop.tensors import read_tensors
from lm.lease import Lease
from lm.model import ModelConfig
from lm.runs.initial import take_initial
from lm.runs.records import Run
from lm.runs.weights import SavedWeights


@pytest.mark.parametrize('form', MECHANISMS)
def test_weights_of_every_mechanism_survive_a_round_trip(form):
    config = shapes.experiment(MECHANISMS[form])
    weights = shapes.random_weights(config)
    tensors = to_tensors(weights)
    assert sum(x.size for x in tensors.values()) == sum(x.size for x in jax.tree.leaves(weights))
    back = from_tensors(tensors, shapes.abstract_weights(config), 'x')
    jax.tree.map(np.testing.assert_array_equal, weights, back)


def test_formulas_fit_into_one_module():
    """An export joins the files, so no two define the same name."""
    defined = collections.Counter()
    tree = ast.parse(attention_source(FORMULAS))
    for node in tree.body:
        names = [node] if isinstance(node, ast.ClassDef | ast.FunctionDef) else getattr(node, 'targets', [])
        defined.update(getattr(target, 'id', None) or target.name for target in names)
    assert {name for name, count in defined.items() if count > 1} == set()
    lines = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert {re.split('[ .]', line)[1] for line in lines} - sys.stdlib_module_names == {'torch', 'transformers'}


MINE = """
from lm.attention.formulas.base import Formula


class MyFormula(Formula, name='mine'):
    pass
"""


def test_exports_ship_the_formula_of_a_users_module(tmp_path, monkeypatch):
    for name, more in (('my_formula', ''), ('my_mechanism', 'from lm.attention.base import HeadDims\n')):
        (tmp_path / f'{name}.py').write_text(more + MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(FORMULAS, 'mine', None)  # what the imports below register is gone after the test
    importlib.import_module('my_formula')
    tree = ast.parse(attention_source({'mine'}))
    assert 'MyFormula' in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    imported = [node.module or '' for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [module for module in imported if module.startswith('lm')]
    check, model = FORMATS['huggingface'].check, ModelConfig(attention=(Softmax(),))
    monkeypatch.setitem(FORMULAS, 'softmax', FORMULAS['mine'])
    check(model)
    importlib.import_module('my_mechanism')
    monkeypatch.setitem(FORMULAS, 'softmax', FORMULAS['mine'])
    with pytest.raises(ConfigError, match=r'is in my_mechanism, which imports lm\.attention\.base; move it'):
        check(model)
    monkeypatch.delitem(FORMULAS, 'softmax')
    with pytest.raises(ConfigError, match=r'does not know @softmax\(\), for no imported module has its formula'):
        check(model)


def test_exported_names_belong_to_layers():
    config = shapes.experiment((Softmax(window=4), Softmax()))
    weights = shapes.random_weights(config)
    tensors = to_tensors(weights)
    assert len(places(weights)) == len(tensors) == 2 + 1 + 4 * (4 + 4)
    # Layer 3 is the second layer of the second mechanism. PyTorch puts outputs first.
    kernel = weights['params']['blocks'][1]['qkv']['kernel'][1]
    np.testing.assert_array_equal(tensors['layers.3.qkv.weight'], kernel.T)
    np.testing.assert_array_equal(tensors['embedding.weight'], weights['params']['embedding']['embedding'])


def test_tensors_that_do_not_fit_are_named():
    config = shapes.experiment(Softmax())
    tensors = to_tensors(shapes.random_weights(config))
    abstract = shapes.abstract_weights(config)
    with pytest.raises(MismatchError, match=r'x: lacks layers.2.glu_out.weight'):
        from_tensors({k: v for k, v in tensors.items() if k != 'layers.2.glu_out.weight'}, abstract, 'x')
    with pytest.raises(MismatchError, match=r'has extra'):
        from_tensors(tensors | {'extra': np.zeros(1)}, abstract, 'x')
    with pytest.raises(MismatchError, match=r'embedding.weight is \[3, 32\], of the model \[97, 32\]'):
        from_tensors(tensors | {'embedding.weight': np.zeros((3, 32))}, abstract, 'x')


def test_every_mechanism_and_option_has_a_formula_for_transformers():
    assert FORMULAS.keys() == mechanisms().keys()
    for form in MECHANISMS.values():
        for options in ({}, shapes.BLOCK, shapes.HEADS, shapes.GEMMA, shapes.OLMO):
            FORMATS['huggingface'].check(shapes.experiment(form, **options).model)


def test_options_without_a_formula_are_refused(monkeypatch):
    FORMATS['huggingface'].check(shapes.experiment(Hybrid(), **shapes.LLAMA).model)
    monkeypatch.delitem(__import__('lm.interop.formats', fromlist=['']).FIELDS, 'norm')
    with pytest.raises(ConfigError, match=r"model.norm = 'rms': the model for transformers has no such option"):
        FORMATS['huggingface'].check(shapes.experiment(Softmax(), norm='rms').model)


@pytest.mark.parametrize('changes', [{'rotary_decoupled': True}, {'latent_query_rank': 4}])
def test_forms_of_latent_attention_without_a_formula_are_refused(changes):
    """Both by the model's own setting and by the mechanism's."""
    latent = {'latent_rank': 6, 'shared_key_dim': 2}
    name = next(iter(changes))
    for model in (ModelConfig(**latent, **changes), ModelConfig(attention=Softmax(**latent, **changes))):
        with pytest.raises(ConfigError, match=rf'\.{name} = .*; export with --format safetensors'):
            FORMATS['huggingface'].check(model)


def test_an_exported_run_can_be_imported(reference_run, tmp_path, tokens, capsys):
    out, back = tmp_path / 'out', tmp_path / 'back'
    run_dir = str(reference_run[0])
    assert main(['export', '--run_dir', run_dir, '--format', 'huggingface', '--out', str(out)]) == 0
    files = {path.name for path in out.iterdir()}
    assert files == {
        'model.safetensors', 'config.gin', 'tokenizer.model', 'config.json', 'modeling_lm.py', 'attention_lm.py',
        'README.md',
    }  # fmt: skip
    assert (out / 'tokenizer.model').read_bytes() == (tokens / 'tokenizer.model').read_bytes()
    for name in ('modeling_lm.py', 'attention_lm.py'):
        assert 'lm.interop' not in (out / name).read_text()
    data = ['--gin_param', f"data.path = '{tokens}'"]
    assert main(['import', str(out), '--run_dir', str(back), *data]) == 0
    before, after = lm.load(run_dir), lm.load(str(back))
    jax.tree.map(np.testing.assert_array_equal, before.weights, after.weights)
    assert after.step == 0
    assert after.experiment.model == before.experiment.model
    # The directory is complete: a second export or import into it is refused.
    capsys.readouterr()
    assert main(['export', '--run_dir', run_dir, '--out', str(out)]) == 2
    assert main(['import', str(out), '--run_dir', str(back)]) == 2
    assert capsys.readouterr().err.count('is there already') == 2
    # Neither writes folders called gs:, nor looks for them.
    assert main(['export', '--run_dir', run_dir, '--out', 'gs://b/x']) == 2
    assert 'must lie on a disk of this machine' in capsys.readouterr().err


@contextlib.contextmanager
def hardly_any_room(room: int = 50_000):
    """Acts like a full disk for files over so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_the_same_command_completes_an_export_or_import_after_a_full_disk(reference_run, tokens, tmp_path, capsys):
    out, back = tmp_path / 'out', tmp_path / 'back'
    export = ['export', '--run_dir', str(reference_run[0]), '--out', str(out)]
    again = ['import', str(out), '--run_dir', str(back), *tiny.params({'data.path': str(tokens)})]
    for command, room, said in (
        (export, 50_000, 'model.safetensors cannot be written (File too large'),
        (again, 8000, ' cannot be written ('),  # arrays are written in small parts
    ):
        with hardly_any_room(room):
            assert main(command) == 1
        assert said in capsys.readouterr().err
        assert main(command) == 0
    assert lm.load(str(back)).step == 0
    assert (back / 'model.gin').exists()


KILLED = """
import os, signal, sys
from lm.cli import main
from lm.interop.formats import TransformersFormat

TransformersFormat.others = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # the weights are written
main(['export', '--format', 'huggingface', *sys.argv[1:]])
"""


def test_the_same_command_completes_an_export_or_import_after_a_kill(reference_run, tmp_path, capsys):
    out = tmp_path / 'out'
    flags = ['--run_dir', str(reference_run[0]), '--out', str(out)]
    subprocess.run([sys.executable, '-c', KILLED, *flags], env=tiny.environment(), cwd=tiny.ROOT)
    (out / 'config.json').write_text('half')  # it has another format than the file below
    assert (out / 'model.safetensors').exists()
    # A file that is not of the export stays. A file of an export in progress stays too.
    (out / 'notes.txt').write_text('mine')
    assert main(['export', *flags]) == 2
    assert 'an export was stopped there, but notes.txt is not of it' in capsys.readouterr().err
    of_the_dead = (out / UNFINISHED).read_text()
    with Lease(out, UNFINISHED):
        (out / 'notes.txt').unlink()
        assert main(['export', *flags]) == 2
        assert main(['import', str(out), '--run_dir', str(tmp_path / 'back')]) == 44
    printed = capsys.readouterr().err
    assert 'another process exports to it' in printed
    assert 'out: holds half an export; run that lm export again' in printed
    assert not (tmp_path / 'back').exists()
    assert (out / 'config.json').read_text() == 'half'
    (out / UNFINISHED).write_text(of_the_dead)
    assert main(['export', *flags]) == 0
    files = {'model.safetensors', 'config.gin', 'tokenizer.model', 'README.md'}
    assert {path.name for path in out.iterdir()} == files


def test_a_failed_export_removes_only_its_own_files(tmp_path):
    def fail(folder):
        with exporting(folder):
            (folder / 'model.safetensors').write_text('half')
            (folder / 'notes.txt').write_text('mine')
            raise OSError

    with pytest.raises(OSError):  # noqa: PT011
        fail(tmp_path / 'out')
    assert [path.name for path in (tmp_path / 'out').iterdir()] == ['notes.txt']
    with pytest.raises(ConfigError, match='is there already'):
        fail(tmp_path / 'out')
    assert [path.name for path in (tmp_path / 'out').iterdir()] == ['notes.txt']


def llama_config(**changes) -> dict:
    """Returns config.json as transformers 4 writes it."""
    return {
        'model_type': 'llama', 'vocab_size': 400, 'num_hidden_layers': 2, 'hidden_size': 32, 'num_attention_heads': 2,
        'num_key_value_heads': 1, 'head_dim': 16, 'intermediate_size': 48, 'hidden_act': 'silu', 'rms_norm_eps': 1e-5,
        'rope_theta': 500000.0, 'tie_word_embeddings': False,
    } | changes  # fmt: skip


def write_llama(folder, **changes):
    """Writes a checkpoint with random weights, in two files."""
    rng = np.random.default_rng(0)
    sizes = {
        'input_layernorm': (32,), 'self_attn.q_proj': (32, 32), 'self_attn.k_proj': (16, 32),
        'self_attn.v_proj': (16, 32), 'self_attn.o_proj': (32, 32), 'post_attention_layernorm': (32,),
        'mlp.up_proj': (48, 32), 'mlp.gate_proj': (48, 32), 'mlp.down_proj': (32, 48),
    }  # fmt: skip
    named = {f'model.layers.{i}.{name}.weight': size for i in range(2) for name, size in sizes.items()}
    named |= {'model.embed_tokens.weight': (400, 32), 'model.norm.weight': (32,), 'lm_head.weight': (400, 32)}
    tensors = {name: rng.normal(size=size).astype(np.float32) for name, size in named.items()}
    folder.mkdir()
    (folder / 'config.json').write_text(json.dumps(llama_config(**changes)))
    parts = {'a.safetensors': sorted(tensors)[:10], 'b.safetensors': sorted(tensors)[10:]}
    for part, names in parts.items():
        save_file({name: tensors[name] for name in names}, folder / part)
    index = {name: part for part, names in parts.items() for name in names}
    (folder / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': index}))
    return tensors


@pytest.mark.parametrize(
    ('asked', 'told'),
    [
        ('model.attention = @hybrid()', 'model.attention = @hybrid(): an import keeps .* has @softmax()'),
        ('softmax.window = 16', 'softmax.window = 16: .* has None'),
        ('model.dtype = "bfloat16"', "model.dtype = 'bfloat16': .* has 'auto'; leave this out"),
    ],
)
def test_an_import_refuses_settings_that_contradict_the_model(asked, told, tmp_path, capsys):
    write_llama(tmp_path / 'llama')
    command = ['import', str(tmp_path / 'llama'), '--run_dir', str(tmp_path / 'run'), '--gin_param']
    assert main([*command, asked]) == 2
    assert re.search(told.replace('()', r'\(\)'), capsys.readouterr().err)
    assert not (tmp_path / 'run').exists()


def test_a_llama_is_continued_under_the_hybrid(tmp_path, tokens, capsys):
    theirs = write_llama(tmp_path / 'llama')
    run = tmp_path / 'run'
    assert main(['import', str(tmp_path / 'llama'), '--run_dir', str(run)]) == 0
    data = tiny.params({'data.path': str(tokens)})
    for flags in (
        ['--run_dir', str(run)],
        ['--run_dir', str(tmp_path / 'new'), '--branch_from', str(run), '--step', '0'],
    ):
        assert main(['train', *flags, *data]) == 2
        assert f'{run}: was made by lm import and has no optimizer state' in capsys.readouterr().err
    bindings = {name: value for name, value in tiny.MODEL.items() if not name.startswith('model.')} | {
        'data.path': str(tokens),
        'train.init_from': str(run),
    }
    params = [word for word in tiny.params(bindings) if word != '--gin_param']
    experiment = lm.configure([str(run / 'model.gin'), 'configs/attention/hybrid.gin'], params)
    assert experiment.model.norm == 'rms'
    assert experiment.model.pattern[0].gin_name == 'hybrid'
    abstract = shapes.abstract_weights(experiment)
    taken, line, _ = take_initial(SavedWeights('train.init_from', str(run), None, {}), str(tokens), abstract, abstract)
    assert line == f'9 of 9 arrays taken from {run} at step 0'
    taken = taken['params']
    np.testing.assert_array_equal(taken['head'], theirs['lm_head.weight'])
    up = taken['blocks'][0]['glu_in']['kernel'][1][:, :48]
    np.testing.assert_array_equal(up, theirs['model.layers.1.mlp.up_proj.weight'].T)
    assert lm.validate(experiment) == []


@pytest.mark.parametrize(
    ('changes', 'said'),
    [
        ({'model_type': 'gpt2', 'activation_function': 'relu'}, "activation_function = 'relu'"),
        ({'model_type': 'gpt2', 'scale_attn_by_inverse_layer_idx': True}, 'attention that is scaled by the layer'),
        ({'model_type': 'bert'}, "model_type = 'bert': can be imported are"),
    ],
)
def test_differences_from_the_model_are_reported(tmp_path, capsys, changes, said):
    write_llama(tmp_path / 'llama', **changes)
    run = tmp_path / 'run'
    assert main(['import', str(tmp_path / 'llama'), '--run_dir', str(run)]) == 2
    assert said in capsys.readouterr().err
    assert not run.exists()


def gpt2_logits(w: dict, tokens_T: np.ndarray, heads: int) -> np.ndarray:
    """Computes the logits of a GPT-2 as Radford et al. (2019) describe it, [T, V]; its matrices have inputs first."""

    def norm(x, name):
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * w[f'{name}.weight'] + w[f'{name}.bias']

    def linear(x, name):
        return x @ w[f'{name}.weight'] + w[f'{name}.bias']

    T = len(tokens_T)
    x_TxD = w['wte.weight'][tokens_T] + w['wpe.weight'][:T]
    for i in range(sum(name.endswith('ln_1.weight') for name in w)):
        q, k, v = np.split(linear(norm(x_TxD, f'h.{i}.ln_1'), f'h.{i}.attn.c_attn'), 3, axis=-1)
        parts = []
        for q, k, v in zip(*(np.split(part, heads, axis=-1) for part in (q, k, v)), strict=True):  # noqa: B020
            scores = np.where(np.tri(T, dtype=bool), q @ k.T / np.sqrt(q.shape[-1]), -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            parts.append(weights / weights.sum(-1, keepdims=True) @ v)
        x_TxD = x_TxD + linear(np.concatenate(parts, axis=-1), f'h.{i}.attn.c_proj')
        h = linear(norm(x_TxD, f'h.{i}.ln_2'), f'h.{i}.mlp.c_fc')
        h = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
        x_TxD = x_TxD + linear(h, f'h.{i}.mlp.c_proj')
    return norm(x_TxD, 'ln_f') @ w['wte.weight'].T


def test_a_gpt2_is_imported(tmp_path, tokens, capsys):
    """The files have the names of the first GPT-2, and its masks too."""
    maps = {'attn.c_attn': (32, 96), 'attn.c_proj': (32, 32), 'mlp.c_fc': (32, 128), 'mlp.c_proj': (128, 32)}
    named = {f'h.{i}.{name}.weight': size for i in range(2) for name, size in maps.items()}
    named |= {f'h.{i}.{name}.bias': size[1:] for i in range(2) for name, size in maps.items()}
    norms = ['ln_f', *(f'h.{i}.ln_{j}' for i in range(2) for j in (1, 2))]
    named |= {f'{norm}.{part}': (32,) for norm in norms for part in ('weight', 'bias')}
    named |= {'wte.weight': (400, 32), 'wpe.weight': (40, 32)}
    rng = np.random.default_rng(0)
    theirs = {name: (0.5 * rng.normal(size=size)).astype(np.float32) for name, size in named.items()}
    folder, run = tmp_path / 'gpt2', tmp_path / 'run'
    folder.mkdir()
    masks = {f'h.{i}.attn.bias': np.tri(40, dtype=np.float32)[None, None] for i in range(2)}
    save_file(theirs | masks, folder / 'model.safetensors')
    sizes = {'vocab_size': 400, 'n_layer': 2, 'n_embd': 32, 'n_head': 4, 'n_positions': 40}
    (folder / 'config.json').write_text(json.dumps({'model_type': 'gpt2', **sizes}))
    assert main(['import', str(folder), '--run_dir', str(run), *tiny.params({'train.context_length': 64})]) == 2
    assert 'model.learned_positions = 40: fewer than the 64 tokens' in capsys.readouterr().err
    assert not run.exists()
    bindings = {'train.context_length': 32, 'train.tokens_per_step': 256, 'data.path': str(tokens)}
    assert main(['import', str(folder), '--run_dir', str(run), *tiny.params(bindings)]) == 0
    loaded = lm.load(str(run))
    asked = rng.integers(0, 400, 40)
    logits = np.asarray(loaded.model(asked[None])[0])
    expected = gpt2_logits(theirs, asked, heads=4)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    # It writes up to its last position, and no further.
    lm.generate(loaded, 'import', max_tokens=40 - len(loaded.tokenizer.encode('import')), temperature=0)
    with pytest.raises(ConfigError, match='fewer than the 41 tokens'):
        lm.generate(loaded, 'import', max_tokens=41 - len(loaded.tokenizer.encode('import')), temperature=0)
    with pytest.raises(ConfigError, match=r'fewer than the 41 tokens of the context; shorten train.context_length'):
        lm.evaluate(loaded, context_length=41)
    named = tiny.params({'data.path': str(tokens), 'evaluate.context_length': 41})
    assert main(['check', '--gin_file', str(run / 'config.gin'), *named]) == 2
    assert 'fewer than the 41 tokens' in capsys.readouterr().err


def test_another_tokenizer_is_refused(tmp_path, tokens, capsys):
    write_llama(tmp_path / 'llama')
    text = (tokens.parent / 'text' / 'train' / 'typing.txt').read_text()
    model = train(TokenizerConfig(vocab_size=360), [text])
    (tmp_path / 'llama' / 'tokenizer.model').write_bytes(model)
    command = ['import', str(tmp_path / 'llama'), '--run_dir', str(tmp_path / 'run')]
    assert main([*command, '--gin_param', f"data.path = '{tokens}'"]) == 44
    assert 'is not the tokenizer of' in capsys.readouterr().err


@pytest.fixture
def hugging_face(tokens, tmp_path):
    """Returns a store, and the tokenizer.json that made it."""
    import tokenizers

    text = (tokens.parent / 'text' / 'train' / 'typing.txt').read_text()
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator([text], vocab_size=300, special_tokens=['</s>'], show_progress=False)
    tokenizer = from_bytes(made.to_str().encode())
    return tiny.write_store(tmp_path / 'store', {'train': [text], 'validation': [text[:3000]]}, tokenizer), tokenizer


def test_a_tokenizer_is_exported_under_the_name_of_its_kind(hugging_face, tmp_path):
    store, tokenizer = hugging_face
    config = dataclasses.replace(shapes.experiment(Softmax()), data=DataConfig(path=str(store)))
    run = shapes.run_of(config, shapes.random_weights(config))
    run.tokenizer, run.begin_id = tokenizer, tokenizer.eod_id
    (tmp_path / 'out').mkdir()
    FORMATS['safetensors'].write(run, tmp_path / 'out')
    assert (tmp_path / 'out' / 'tokenizer.json').read_bytes() == tokenizer.model
    assert not (tmp_path / 'out' / 'tokenizer.model').exists()


def test_tokenizers_of_every_kind_and_mixtures_are_compared(hugging_face, tokens, tmp_path, caplog):
    store, tokenizer = hugging_face
    folder = tmp_path / 'checkpoint'
    folder.mkdir()
    (folder / 'config.json').write_text(json.dumps(llama_config()))
    model = shapes.experiment(Softmax(), vocab_size=400).model

    def known(**data):
        checkpoint, experiment = CheckpointFolder(folder), lm.Experiment(model=model, data=DataConfig(**data))
        found = checkpoint.find_tokenizers()
        return choose_tokenizers(experiment, found, folder, checkpoint.marks).fingerprints

    assert known() == {}
    (folder / 'tokenizer.json').write_bytes(tokenizer.model)
    assert known() == known(path=str(store)) == {'tokenizer': tokenizer.sha256}
    assert known(mixture={str(store): 1}) == {'tokenizer': tokenizer.sha256}
    with pytest.raises(MismatchError, match=r'tokenizer.json: is not the tokenizer of .*tokens; prepare the data with'):
        known(mixture={str(tokens): 1})
    # Many checkpoints have one tokenizer in two kinds. The data say which kind they use.
    (folder / 'tokenizer.model').write_bytes((tokens / 'tokenizer.model').read_bytes())
    assert known() == {}
    assert known(mixture={str(store): 1}) == {'tokenizer': tokenizer.sha256}
    assert known(path=str(tokens)) == {'tokenizer': TokenStore.open(str(tokens)).fingerprints['tokenizer']}
    (folder / 'tokenizer.model').write_bytes(b'broken')
    assert known(path=str(store)) == {'tokenizer': tokenizer.sha256}
    assert 'is not compared: tokenizer.model_path' in caplog.text


def test_bfloat16_becomes_float32(tmp_path):
    import jax.numpy as jnp
    from safetensors.flax import save_file as save_flax

    save_flax({'x': jnp.array([1.5, -2.0], jnp.bfloat16)}, str(tmp_path / 'model.safetensors'))
    x = read_tensors(tmp_path)['x']
    assert x.dtype == np.float32
    assert np.asarray(x).tolist() == [1.5, -2.0]
    (tmp_path / 'model.safetensors').write_bytes(b'broken')
    with pytest.raises(MismatchError, match='cannot be read'):
        read_tensors(tmp_path)


def test_weights_of_half_the_bits_lie_in_several_files(reference_run, tokens, tmp_path, capsys):
    """A killed export of several files is deleted like any other; the import reads all files."""
    out, back, run_dir = tmp_path / 'out', tmp_path / 'back', str(reference_run[0])
    command = ['export', '--run_dir', run_dir, '--format', 'huggingface', '--out', str(out), '--dtype', 'bfloat16']
    assert main([*command, '--file_gb', '0']) == 2
    assert '--file_gb 0: must be 0.000001 to 1,000,000' in capsys.readouterr().err
    out.mkdir()
    for name in (UNFINISHED, 'model-00001-of-00009.safetensors', 'model.safetensors.index.json'):
        (out / name).write_text('half')
    assert main([*command, '--file_gb', '0.00003']) == 0
    files = sorted(path.name for path in out.glob('model*.safetensors'))
    assert files == [f'model-{i:05}-of-{len(files):05}.safetensors' for i in range(1, len(files) + 1)]
    assert len(files) > 1
    assert json.loads((out / 'config.json').read_text())['torch_dtype'] == 'bfloat16'
    index = json.loads((out / 'model.safetensors.index.json').read_text())
    assert sorted(set(index['weight_map'].values())) == files
    run = lm.load(run_dir)
    assert index['metadata']['total_size'] == 2 * sum(x.size for x in jax.tree.leaves(run.weights))
    assert main(['import', str(out), '--run_dir', str(back), '--set', f'data.path={tokens}']) == 0
    halved = jax.tree.map(lambda x: x.astype('bfloat16').astype('float32'), run.weights)
    jax.tree.map(np.testing.assert_array_equal, halved, lm.load(str(back)).weights)


def test_exports_of_equal_tensors_have_equal_bytes(reference_run, tmp_path, capsys):
    run_dir, folders = str(reference_run[0]), [tmp_path / name for name in 'ab']
    for folder in folders:
        assert main(['export', '--run_dir', run_dir, '--format', 'huggingface', '--out', str(folder)]) == 0
    first, second = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders)
    assert first == second
    said = 'takes at most 1.0 GB of memory: its largest tensor, embedding.weight, has 0.00 GB'
    assert capsys.readouterr().out.count(said) == 2
    weights = to_tensors(lm.load(run_dir).weights)
    found = load_file(folders[0] / 'model.safetensors')
    assert found.keys() == weights.keys()
    for name, tensor in found.items():
        np.testing.assert_array_equal(tensor, weights[name])


def test_an_export_has_a_model_card(reference_run, tmp_path):
    run_dir, out = str(reference_run[0]), tmp_path / 'out'
    assert main(['export', '--run_dir', run_dir, '--format', 'huggingface', '--out', str(out)]) == 0
    card, run = (out / 'README.md').read_text(), lm.load(run_dir)
    tokens = run.step * run.experiment.train.tokens_per_step
    perplexity = Run.read(run_dir).evals[-1]['perplexity']
    for part in (
        'library_name: transformers',
        f'{run.step:,} steps of {run.experiment.train.tokens_per_step:,} tokens: {tokens:,} in all.',
        f'| {perplexity:.4f} |',
        f'train --run_dir {run_dir}',
        run.store.fingerprint,
        'trust_remote_code=True',
        '## Licence',
    ):
        assert part in card, part
    assert main(['import', str(out), '--run_dir', str(tmp_path / 'back')]) == 0
    assert main(['export', '--run_dir', str(tmp_path / 'back'), '--out', str(tmp_path / 'again')]) == 0
    assert 'They were not trained further.' in (tmp_path / 'again' / 'README.md').read_text()


def test_safetensors_hold_the_step(tmp_path):
    config = shapes.experiment(Softmax())
    FORMATS['safetensors'].write(shapes.run_of(config, shapes.random_weights(config)), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {'model.safetensors', 'config.gin'}
    assert load_file(tmp_path / 'model.safetensors')['final_norm.weight'].shape == (32,)


@pytest.mark.parametrize('mask', [0o022, 0o077, 0o002])
def test_the_weights_have_the_mode_of_the_other_files(mask, tmp_path):
    config, before = shapes.experiment(Softmax()), os.umask(mask)
    try:
        FORMATS['safetensors'].write(shapes.run_of(config, shapes.random_weights(config)), tmp_path)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o666 & ~mask}


def test_an_import_of_an_export_is_evaluated_like_the_run(reference_run, tokens, tmp_path, capsys):
    """The import takes the run's context length and windows. Explicit values win. Paths and jobs stay behind."""
    out, back = str(tmp_path / 'out'), str(tmp_path / 'back')
    assert main(['export', '--run_dir', str(reference_run[0]), '--out', out]) == 0
    assert main(['import', out, '--run_dir', back, '--set', f'data.path={tokens}']) == 0
    assert evaluated(str(reference_run[0]), capsys) == evaluated(back, capsys)
    experiment = load_given(out, [], ['train.context_length = 128'])
    assert experiment.train.context_length == 128
    assert experiment.data.path == ''
    assert experiment.mesh.processes is None
    assert load_given(out, [], []).train.context_length == tiny.MODEL['train.context_length']


def evaluated(run: str, capsys) -> tuple[int, float]:
    """Returns (context length, perplexity) from the JSON that `lm evaluate` prints."""
    capsys.readouterr()
    assert main(['evaluate', '--run_dir', run, '--json']) == 0
    shown = json.loads(capsys.readouterr().out)
    return shown['context_length'], shown['perplexity']


@pytest.mark.parametrize('heads', [4, 2])
def test_the_documented_code_computes_the_logits(heads, tmp_path):
    """The code on the page computes the logits of an export with NumPy alone."""
    config = shapes.experiment(Softmax(), n_kv_heads=heads)
    weights = shapes.random_weights(config)
    FORMATS['huggingface'].write(shapes.run_of(config, weights), tmp_path)
    page = (tiny.ROOT / 'docs' / 'reference' / 'weights.md').read_text()
    (code,) = [block for block in re.findall(r'```python\n(.*?)```', page, re.DOTALL) if 'def logits' in block]
    names: dict = {}
    exec(code.replace('exports/quickstart', str(tmp_path)), names)
    tokens = np.random.default_rng(1).integers(0, 97, 24)
    (ours,) = shapes.our_logits(config, weights, tokens[None])
    np.testing.assert_allclose(names['logits'](tokens), ours, rtol=0, atol=1e-5 * np.abs(ours).max())
