"""An import and an export hold one tensor at a time."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
import tiny
from safetensors.numpy import save_file

WIDTH, HIDDEN, LAYERS, VOCABULARY = 1024, 4096, 20, 2000
MEASURE = """
import pathlib, re, sys
from lm.cli import main

def peak():  # in bytes, since the last call
    found = re.search(r'VmHWM:\\s+(\\d+)', pathlib.Path('/proc/self/status').read_text())
    pathlib.Path('/proc/self/clear_refs').write_text('5')
    return int(found[1]) * 1024

small, large, folder, tokenizer = sys.argv[1:]
for model in (small, large):  # the small one brings everything that is imported into memory
    before, run = peak(), f'{folder}/run_of_{model.rpartition("/")[2]}'
    assert not main(['import', model, '--run_dir', run, '--tokenizer', tokenizer])
    between = peak()
    assert not main(['export', '--run_dir', run, '--format', 'native', '--out', f'{run}/out', '--dtype', 'bfloat16'])
print('took', between - before, peak() - before)
"""


def write_model(folder, width, hidden, layers):
    """Writes a Llama of random tensors, a file for each layer. Returns the bytes of all tensors and of the largest."""
    rng = np.random.default_rng(0)
    names = {f'self_attn.{x}_proj': (width, width) for x in 'qkvo'}
    names |= {'mlp.up_proj': (hidden, width), 'mlp.gate_proj': (hidden, width), 'mlp.down_proj': (width, hidden)}
    layer = {name: rng.standard_normal(size, np.float32) for name, size in names.items()}
    layer |= {f'{name}layernorm': np.ones(width, np.float32) for name in ('input_', 'post_attention_')}
    ends = {'model.embed_tokens.weight': rng.standard_normal((VOCABULARY, width), np.float32)}
    ends['model.norm.weight'] = np.ones(width, np.float32)
    files = {f'{i}.safetensors': {f'model.layers.{i}.{n}.weight': x for n, x in layer.items()} for i in range(layers)}
    files['ends.safetensors'] = ends
    folder.mkdir()
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
    (folder / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': weight_map}))
    config = {
        'model_type': 'llama', 'hidden_size': width, 'intermediate_size': hidden, 'num_hidden_layers': layers,
        'num_attention_heads': 8, 'num_key_value_heads': 8, 'vocab_size': VOCABULARY, 'rms_norm_eps': 1e-5,
        'rope_theta': 10000.0, 'max_position_embeddings': 128, 'tie_word_embeddings': True, 'hidden_act': 'silu',
    }  # fmt: skip
    (folder / 'config.json').write_text(json.dumps(config))
    return sum(x.nbytes for tensors in files.values() for x in tensors.values()), 2 * 4 * hidden * width


@pytest.mark.slow
def test_the_memory_is_the_predicted_one(tokens, tmp_path):
    write_model(tmp_path / 'small', 64, 128, 1)
    total, largest = write_model(tmp_path / 'large', WIDTH, HIDDEN, LAYERS)
    paths = tmp_path / 'small', tmp_path / 'large', tmp_path, tokens / 'tokenizer.model'
    command = [sys.executable, '-c', MEASURE, *map(str, paths)]
    done = subprocess.run(command, env=tiny.environment(), cwd=tiny.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    predicted = re.findall(r'takes at most ([\d.]+) GB of memory', done.stdout)
    # The checkpoint has chunks of 64 MiB, two of the largest tensors.
    assert predicted[2:] == [f'{(3 * size + 1e9) / 1e9:.1f}' for size in (largest, 2 * largest)]
    import_took, export_took = map(int, re.search(r'took (\d+) (\d+)', done.stdout).groups())
    assert max(import_took, export_took) < 3 * largest + 6e8 < total / 1.8  # the weights at once would take more
