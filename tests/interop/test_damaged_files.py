"""Checkpoints with damage of any kind: each ends with one line, soon, and without a traceback.

The complete check draws a hundred per format. `scripts/test.sh -m slow tests/interop/test_damaged_files.py` draws for
an hour per format, or for FUZZ_SECONDS of processor time.
"""

import dataclasses
import json
import os
import pathlib
import re

import gguf
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from damage import LENGTHS, check_damages, tell_damage
from safetensors.numpy import load_file, save_file
from test_exchange import write_llama
from test_gguf import write_gguf

from lm.cli import main
from lm.interop.checkpoints import open_checkpoint
from lm.interop.import_run import choose_family, choose_tokenizers, describe_model, load_given, read_weights
from lm.model.functions import ModelFunctions


def read_all(path: pathlib.Path) -> None:
    """Reads what an import reads."""
    experiment = load_given(str(path), [], [])
    checkpoint = open_checkpoint(path)
    family = choose_family(checkpoint)
    experiment = dataclasses.replace(experiment, model=describe_model(family, checkpoint))
    choose_tokenizers(experiment, checkpoint.find_tokenizers(), path, checkpoint.marks)
    read_weights(family, checkpoint, ModelFunctions(experiment.model, jnp.float32))


def write_folder(folder):
    """Writes a folder of Hugging Face with a tokenizer."""
    tokenizer = write_gguf(folder.with_suffix('.gguf'), write_llama(folder))
    (folder / 'tokenizer.json').write_bytes(tokenizer)
    return folder


def write_plain_gguf(folder):
    write_gguf(folder.with_suffix('.gguf'), write_llama(folder))
    return folder.with_suffix('.gguf')


def write_quantized_gguf(folder):
    write_gguf(folder.with_suffix('.gguf'), write_llama(folder), gguf.GGMLQuantizationType.Q8_0)
    return folder.with_suffix('.gguf')


def write_export(folder, how):
    """Imports a Llama and exports it again."""
    checkpoint, run = write_folder(folder.with_name('llama')), folder.with_name('run')
    assert main(['import', str(checkpoint), '--run_dir', str(run)]) == 0
    assert main(['export', '--run_dir', str(run), '--out', str(folder), '--format', how]) == 0
    return folder


FORMATS = {
    'folder': write_folder,
    'gguf': write_plain_gguf,
    'quantized gguf': write_quantized_gguf,
    'export': lambda folder: write_export(folder, 'safetensors'),
    'export for transformers': lambda folder: write_export(folder, 'huggingface'),
    'native export': lambda folder: write_export(folder, 'native'),
}
"""Name → a function that writes a sound checkpoint and returns its folder or file."""


@pytest.fixture(scope='module', params=FORMATS)
def whole(request, tmp_path_factory) -> pathlib.Path:
    """Returns a sound checkpoint: a folder, or a file."""
    path = FORMATS[request.param](tmp_path_factory.mktemp('whole') / request.param.replace(' ', '_'))
    read_all(path)
    return path


@pytest.mark.parametrize('seconds', LENGTHS)
def test_damage_is_told_in_one_line(whole, tmp_path, seconds):
    check_damages(whole, read_all, tmp_path, seconds)


def tell(path: pathlib.Path) -> str | None:
    """Returns what an import says about a checkpoint; None where it is sound."""
    return tell_damage(read_all, path)


def change_config(folder, **changes):
    path = folder / 'config.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder, change):
    path = folder / 'a.safetensors'
    save_file({name: change(name, tensor) for name, tensor in load_file(path).items()}, path)


def rename(folder, change):
    for path in folder.glob('*.safetensors'):
        save_file({change(name): tensor for name, tensor in load_file(path).items()}, path)


def add_twin(folder):
    name, tensor = next(iter(load_file(folder / 'a.safetensors').items()))
    save_file({**load_file(folder / 'b.safetensors'), name: tensor + 1}, folder / 'b.safetensors')


def put_pipe(folder, name):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)


DAMAGES = {
    'integers': (lambda f: change_tensors(f, lambda _, x: x.astype(np.int32)), 'holds I32, and weights are'),
    'eighths': (
        lambda f: change_tensors(f, lambda _, x: x.astype(ml_dtypes.float8_e4m3fn)),
        'holds F8_E4M3',
    ),
    'overflow': (
        lambda f: change_tensors(f, lambda _, x: x.astype(np.float64) * 1e300),
        'the numbers of lm_head.weight are not all finite',
    ),
    'two contents': (add_twin, 'differs between .*a.safetensors and .*b.safetensors; keep the right file'),
    'no end': (lambda f: change_config(f, eos_token_id=10**9), 'eos_token_id = 1000000000: the ids .* are below 400'),
    'negative end': (lambda f: change_config(f, eos_token_id=[3, -5]), 'eos_token_id = -5: '),
    'no beginning': (lambda f: change_config(f, bos_token_id=400), 'bos_token_id = 400: '),
    'layers': (
        lambda f: change_config(f, num_hidden_layers=100_000),
        'num_hidden_layers = 100000, .* only 21',
    ),
    'bytes behind': (
        lambda f: (f / 'b.safetensors').open('ab').write(bytes(64)),
        'b.safetensors cannot be read .it has another number of bytes than its header says',
    ),
    'bytes cut': (
        lambda f: os.truncate(f / 'b.safetensors', (f / 'b.safetensors').stat().st_size - 100),
        'b.safetensors cannot be read .it has another number of bytes than its header says',
    ),
    'pipe of weights': (lambda f: put_pipe(f, 'b.safetensors'), 'b.safetensors: is a pipe or a device'),
    'pipe of marks': (lambda f: put_pipe(f, 'tokenizer_config.json'), 'tokenizer_config.json: is a pipe'),
    'base': (
        lambda f: rename(f, lambda name: name.removeprefix('model.')),
        "lacks the tensor 'model.embed_tokens.weight', and has 'embed_tokens.weight': it was saved without its head",
    ),
    'part': (lambda f: rename(f, lambda name: f'student.{name}'), 'it was saved inside another module'),
}


@pytest.mark.parametrize('damage', DAMAGES)
def test_the_file_and_the_tensor_at_fault_are_named(damage, tmp_path):
    write_llama(tmp_path / 'llama')
    apply, said = DAMAGES[damage]
    apply(tmp_path / 'llama')
    assert re.search(said, tell(tmp_path / 'llama') or '')


def test_byte_order_marks_are_no_damage(tmp_path):
    write_llama(tmp_path / 'llama')
    for path in (tmp_path / 'llama').glob('*.json'):
        path.write_bytes(b'\xef\xbb\xbf' + path.read_bytes())
    assert tell(tmp_path / 'llama') is None


@pytest.mark.parametrize('wrapper', ['_orig_mod.', 'module.', 'module._orig_mod.'])
def test_names_of_wrapped_models_are_read(wrapper, tmp_path):
    write_llama(tmp_path / 'llama')
    rename(tmp_path / 'llama', lambda name: wrapper + name)
    assert tell(tmp_path / 'llama') is None
