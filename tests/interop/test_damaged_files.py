"""Checkpoints with damage of any kind: each ends with one line, soon, and without a traceback.

The complete check draws a few hundred; `scripts/test.sh -m slow tests/interop/test_damaged_files.py` draws for an hour.
"""

import json
import os
import pathlib
import re
import resource
import shutil
import struct

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from test_exchange import write_llama
from test_gguf import write_gguf

from lm.errors import LmError
from lm.interop.checkpoints import open_checkpoint
from lm.interop.import_run import choose_family, describe_model, read_weights
from lm.model.functions import ModelFunctions

ODD = (None, True, -5, 0, 1.5, 2**31, 10**9, 2**40, 2**64, 1e308, 'x', '', [], {}, [0], {'a': 1}, [[]])
"""Values that stand where others should."""
HUGE = (0, 1, 2**16, 2**31 - 1, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1)
"""Numbers that are written over a place of a file."""


@st.composite
def damages(draw):
    """Draws a function of the contents of a file that damages them."""
    kind = draw(st.sampled_from(['bits', 'number', 'cut', 'repeat', 'value', 'key']))
    place, other = draw(st.floats(0, 1)), draw(st.floats(0, 1))
    # Headers hold what matters, so half of the places are near the beginning.
    place = place**4 if draw(st.booleans()) else place
    bit, number, value = draw(st.integers(0, 7)), draw(st.sampled_from(HUGE)), draw(st.sampled_from(ODD))

    def damage(contents: bytes) -> bytes:
        at, end = int(place * len(contents)), int(other * len(contents))
        match kind:
            case 'bits':
                return contents[:at] + bytes([contents[at] ^ 1 << bit]) + contents[at + 1 :] if contents[at:] else b''
            case 'number':
                return contents[:at] + struct.pack('<Q', number) + contents[at + 8 :]
            case 'cut':
                return contents[:at]
            case 'repeat':
                return contents[:at] + contents[end:]
        try:
            found = json.loads(contents)
        except ValueError:
            return contents[:at]
        places = _list_places(found)
        *above, last = places[int(place * (len(places) - 1))]
        inside = found
        for key in above:
            inside = inside[key]
        if kind == 'value':
            inside[last] = value
        else:
            del inside[last]
        return json.dumps(found).encode()

    return damage


def _list_places(found, above=()):
    """Returns the keys that lead to each value of a JSON object; of long lists, the first members alone."""
    items = found.items() if isinstance(found, dict) else enumerate(found[:3]) if isinstance(found, list) else ()
    places = [((*above, key), value) for key, value in items]
    return [place for place, _ in places] + [deeper for place, value in places for deeper in _list_places(value, place)]


def read_all(path: pathlib.Path) -> None:
    """Reads what an import reads."""
    checkpoint = open_checkpoint(path)
    family = choose_family(checkpoint)
    model = describe_model(family, checkpoint)
    assert checkpoint.marks is not None
    checkpoint.find_tokenizers()
    read_weights(family, checkpoint, ModelFunctions(model, jnp.float32))


def tell_damage(path: pathlib.Path) -> str | None:
    """Returns what an import says about a checkpoint; None where it is sound."""
    try:
        read_all(path)
    except LmError as error:
        return str(error)
    return None


@pytest.fixture(scope='module', params=['safetensors', 'gguf'])
def whole(request, tmp_path_factory) -> pathlib.Path:
    """Returns a sound checkpoint: a folder, or a file."""
    folder = tmp_path_factory.mktemp('whole') / 'llama'
    tensors = write_llama(folder)
    path = folder.with_suffix('.gguf') if request.param == 'gguf' else folder
    tokenizer = write_gguf(folder.with_suffix('.gguf'), tensors)
    (folder / 'tokenizer.json').write_bytes(tokenizer)
    read_all(path)
    return path


@pytest.mark.parametrize('count', [100, pytest.param(20_000, marks=pytest.mark.slow)])
def test_damage_is_told_in_one_line(whole, tmp_path, count):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    names = sorted(path.name for path in whole.iterdir()) if whole.is_dir() else [whole.name]

    @settings(max_examples=count, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(name=st.sampled_from(names), damage=damages())
    def check(name, damage):
        copy = tmp_path / whole.name
        shutil.copytree(whole, copy, dirs_exist_ok=True) if whole.is_dir() else shutil.copy(whole, copy)
        damaged = copy / name if copy.is_dir() else copy
        damaged.write_bytes(damage(damaged.read_bytes()))
        said = tell_damage(copy)  # any other error than ours fails
        assert said is None or (said and '\n' not in said)

    check()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2e6, 'it needs over 2 GB'


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
    assert re.search(said, tell_damage(tmp_path / 'llama') or '')


def test_byte_order_marks_are_no_damage(tmp_path):
    write_llama(tmp_path / 'llama')
    for path in (tmp_path / 'llama').glob('*.json'):
        path.write_bytes(b'\xef\xbb\xbf' + path.read_bytes())
    assert tell_damage(tmp_path / 'llama') is None


@pytest.mark.parametrize('wrapper', ['_orig_mod.', 'module.', 'module._orig_mod.'])
def test_names_of_wrapped_models_are_read(wrapper, tmp_path):
    write_llama(tmp_path / 'llama')
    rename(tmp_path / 'llama', lambda name: wrapper + name)
    assert tell_damage(tmp_path / 'llama') is None
