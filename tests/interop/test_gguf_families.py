"""The recorded checkpoints as GGUF files: the logits that `transformers` computed from the folders."""

import re

import checkpoints
import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_gguf import NAMES, interleave

from lm.errors import ConfigError
from lm.interop.checkpoints import open_checkpoint
from lm.interop.deferred import Deferred
from lm.interop.families import choose
from lm.interop.gguf.architectures import ARCHITECTURES
from lm.interop.import_run import describe_model, read_weights
from lm.model.functions import ModelFunctions

RECORDED = {
    'llama': 'llama', 'llama_tied': 'llama', 'llama_linear': 'llama', 'qwen2': 'qwen2', 'qwen3': 'qwen3',
    'qwen3_yarn': 'qwen3', 'smollm3': 'smollm3', 'olmo2': 'olmo2', 'gemma': 'gemma', 'gemma2': 'gemma2',
    'gpt2': 'gpt2',
}  # fmt: skip
"""Recorded form → `general.architecture`."""
KEYS = {
    'block_count': ('num_hidden_layers', 'n_layer'),
    'context_length': ('max_position_embeddings', 'n_positions'),
    'embedding_length': ('hidden_size', 'n_embd'),
    'feed_forward_length': ('intermediate_size', 'n_inner'),
    'attention.head_count': ('num_attention_heads', 'n_head'),
    'attention.head_count_kv': ('num_key_value_heads',),
    'attention.key_length': ('head_dim',),
    'attention.layer_norm_rms_epsilon': ('rms_norm_eps',),
    'attention.layer_norm_epsilon': ('layer_norm_epsilon',),
    'attention.sliding_window': ('sliding_window',),
    'attn_logit_softcapping': ('attn_logit_softcapping',),
    'final_logit_softcapping': ('final_logit_softcapping',),
    'rope.freq_base': ('rope_theta',),
    'rope.scaling.type': ('rope_type',),
    'rope.scaling.factor': ('factor',),
    'rope.scaling.original_context_length': ('original_max_position_embeddings',),
}
"""Key of the metadata → the entries of config.json that it states."""
PARTS = NAMES | {
    'self_attn.q_norm': 'attn_q_norm', 'self_attn.k_norm': 'attn_k_norm', 'transformer.wte': 'token_embd',
    'transformer.wpe': 'position_embd', 'transformer.ln_f': 'output_norm', 'ln_1': 'attn_norm', 'ln_2': 'ffn_norm',
    'attn.c_attn': 'attn_qkv', 'attn.c_proj': 'attn_output', 'mlp.c_fc': 'ffn_up', 'mlp.c_proj': 'ffn_down',
}  # fmt: skip
BEHIND = {
    'post_attention_layernorm': 'post_attention_norm', 'post_feedforward_layernorm': 'post_ffw_norm',
    'pre_feedforward_layernorm': 'ffn_norm',
}  # fmt: skip
"""The names of normalizations in families that have some behind their branches."""


def convert(form, path):
    """Writes a recorded checkpoint as llama.cpp's converter does; returns what is recorded."""
    recorded, architecture = checkpoints.load(form), RECORDED[form]
    config = recorded['config'] | (recorded['config'].get('rope_parameters') or {})
    writer = gguf.GGUFWriter(path, architecture)
    for key, names in KEYS.items():
        for value in (config.get(name) for name in names):
            add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}.get(type(value))
            if add and value != 'default':
                add(f'{architecture}.{key}', value)
    for name, tensor in checkpoints.make_tensors(recorded).items():
        layer, part, kind = re.fullmatch(r'(?:(?:model\.layers|transformer\.h)\.(\d+)\.)?(.*)\.(\w+)', name).groups()
        is_query, is_key = part.endswith('q_proj'), part.endswith('k_proj')
        if architecture in ('llama', 'smollm3') and (is_query or is_key):
            tensor = interleave(tensor, config['num_attention_heads' if is_query else 'num_key_value_heads'])
        if architecture.startswith('gemma') and 'norm' in part:
            tensor = tensor + np.float32(1)
        if architecture == 'gemma2' and is_query:  # llama.cpp divides by the root of the size of a head
            tensor = tensor * np.float32(config['head_dim'] / config['query_pre_attn_scalar']) ** 0.5
        if architecture == 'gpt2' and layer and tensor.ndim == 2:
            tensor = np.ascontiguousarray(tensor.T)
        written = (PARTS | (BEHIND if architecture in ('olmo2', 'gemma2') else {}))[part]
        writer.add_tensor(f'blk.{layer}.{written}.{kind}' if layer else f'{written}.{kind}', tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return recorded


@pytest.mark.parametrize('form', RECORDED)
def test_a_gguf_file_gives_the_logits_of_transformers(form, tmp_path):
    recorded = convert(form, tmp_path / 'model.gguf')
    checkpoint = open_checkpoint(tmp_path / 'model.gguf')
    family = choose(checkpoint.config, checkpoint.path)
    functions = ModelFunctions(describe_model(family, checkpoint), jnp.float32)
    weights = jax.tree.map(jnp.asarray, read_weights(family, checkpoint, functions))
    found = np.asarray(functions.merge(weights)(jnp.asarray([recorded['tokens']])))[0]
    expected = np.array(recorded['logits'])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_every_architecture_but_gemma_3_has_a_recorded_form():
    """llama.cpp gives Gemma 3 six kinds of layers in turn, and the recorded one has four layers."""
    assert set(RECORDED.values()) == set(ARCHITECTURES) - {'gemma3'}


def test_tensors_are_read_one_at_a_time(tmp_path, monkeypatch):
    convert('llama', tmp_path / 'model.gguf')
    checkpoint = open_checkpoint(tmp_path / 'model.gguf')
    read, fromfile = [], np.fromfile
    monkeypatch.setattr(np, 'fromfile', lambda *given, **more: read.append(given) or fromfile(*given, **more))
    tensors = checkpoint.read_tensors()
    assert all(isinstance(tensor, Deferred) for tensor in tensors.values())
    assert not read
    np.asarray(tensors['model.layers.1.self_attn.q_proj.weight'])
    assert len(read) == 1


def test_numbers_that_the_package_cannot_read_are_refused(tmp_path, monkeypatch):
    convert('llama', tmp_path / 'model.gguf')
    tensors = open_checkpoint(tmp_path / 'model.gguf').read_tensors()

    def refuse(*given):
        raise NotImplementedError

    monkeypatch.setattr('gguf.quants.dequantize', refuse)
    with pytest.raises(ConfigError, match=r'output_norm\.weight has the type F32, which gguf cannot read'):
        np.asarray(tensors['model.norm.weight'])
