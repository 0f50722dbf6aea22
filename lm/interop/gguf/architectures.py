"""The architectures of GGUF files, by the names of config.json and of the tensors in Hugging Face's form.

llama.cpp documents the keys (docs of the format: ggml/docs/gguf.md), and `convert_hf_to_gguf.py` what it changes in the
weights. `Architecture` states the inverse.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from lm.interop.hyperparameters import Hyperparameters

KEYS = {
    'block_count': 'num_hidden_layers',
    'context_length': 'max_position_embeddings',
    'embedding_length': 'hidden_size',
    'feed_forward_length': 'intermediate_size',
    'attention.head_count': 'num_attention_heads',
    'attention.head_count_kv': 'num_key_value_heads',
    'attention.key_length': 'head_dim',
    'attention.layer_norm_rms_epsilon': 'rms_norm_eps',
    'attention.sliding_window': 'sliding_window',
    'attn_logit_softcapping': 'attn_logit_softcapping',
    'final_logit_softcapping': 'final_logit_softcapping',
    'rope.freq_base': 'rope_theta',
}
"""Key of the metadata, behind the name of the architecture → key of config.json."""
IGNORED = {
    'vocab_size',
    'rope.dimension_count',
    'attention.value_length',
    'rope.scaling.type',
    'rope.scaling.finetuned',
}
"""Keys that `describe` reads by themselves, or that say nothing more."""
SCALING = {
    'rope.scaling.factor': 'factor',
    'rope.scaling.original_context_length': 'original_max_position_embeddings',
    'rope.scaling.yarn_beta_fast': 'beta_fast',
    'rope.scaling.yarn_beta_slow': 'beta_slow',
}
"""Key of the metadata → entry of `rope_scaling` in config.json."""

TENSORS = {
    'attn_norm': 'input_layernorm',
    'attn_q': 'self_attn.q_proj',
    'attn_k': 'self_attn.k_proj',
    'attn_v': 'self_attn.v_proj',
    'attn_q_norm': 'self_attn.q_norm',
    'attn_k_norm': 'self_attn.k_norm',
    'attn_output': 'self_attn.o_proj',
    'ffn_norm': 'post_attention_layernorm',
    'ffn_gate': 'mlp.gate_proj',
    'ffn_up': 'mlp.up_proj',
    'ffn_down': 'mlp.down_proj',
}
"""Tensor of a layer, between 'blk.N.' and '.weight' → name behind 'model.layers.N.'."""
POST_NORMS = {'post_attention_norm': 'post_attention_layernorm', 'post_ffw_norm': 'post_feedforward_layernorm'}
OUTSIDE = {'token_embd': 'model.embed_tokens', 'output_norm': 'model.norm', 'output': 'lm_head'}
"""Tensor outside of the layers → name in Hugging Face's form."""
GPT2_KEYS = {
    'block_count': 'n_layer',
    'context_length': 'n_positions',
    'embedding_length': 'n_embd',
    'feed_forward_length': 'n_inner',
    'attention.head_count': 'n_head',
    'attention.layer_norm_epsilon': 'layer_norm_epsilon',
}
GPT2_TENSORS = {
    'attn_norm': 'ln_1',
    'attn_qkv': 'attn.c_attn',
    'attn_output': 'attn.c_proj',
    'ffn_norm': 'ln_2',
    'ffn_up': 'mlp.c_fc',
    'ffn_down': 'mlp.c_proj',
}
GPT2_OUTSIDE = {'token_embd': 'wte', 'position_embd': 'wpe', 'output_norm': 'ln_f', 'output': 'lm_head'}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One value of `general.architecture`.

    Attributes:
        model_type: of config.json.
        interleaved: the rows of queries and keys are reordered, so that rotary pairs are neighbours.
        gain_offset: what the file adds to the gains of normalizations.
        is_transposed: Hugging Face's matrices of layers have inputs first, the file's have outputs first.
        keys: the keys that the metadata may have, as KEYS.
        layers: the beginning of the names of all tensors of layers.
        outside: as OUTSIDE.
        names: tensors of a layer whose names differ from TENSORS.
        scales_queries: the scale of the queries comes from the sizes (`llama-model.cpp`).
    """

    model_type: str
    interleaved: bool = False
    gain_offset: float = 0.0
    is_transposed: bool = False
    keys: Mapping[str, str] = dataclasses.field(default_factory=lambda: KEYS)
    layers: str = 'model.layers'
    outside: Mapping[str, str] = dataclasses.field(default_factory=lambda: OUTSIDE)
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    scales_queries: bool = False

    def rename(self, name: str) -> str:
        """Returns the name of a tensor in Hugging Face's form; names that are not known stay."""
        stem, _, kind = name.rpartition('.')
        if stem in self.outside:
            return f'{self.outside[stem]}.{kind}'
        block, _, part = stem.partition('.')
        layer, _, part = part.partition('.')
        theirs = (TENSORS | dict(self.names)).get(part)
        return name if block != 'blk' or theirs is None else f'{self.layers}.{layer}.{theirs}.{kind}'

    def restore(self, name: str, tensor: np.ndarray, config: Hyperparameters) -> np.ndarray:
        """Returns a tensor as it was before its conversion. `name` is its name in the file."""
        part = name.split('.')[2] if name.startswith('blk.') else ''
        if self.gain_offset and 'norm' in name:
            return tensor - np.float32(self.gain_offset)
        if self.interleaved and part in ('attn_q', 'attn_k'):
            return apart(tensor, config.integer('num_attention_heads' if part == 'attn_q' else 'num_key_value_heads'))
        return tensor.T if self.is_transposed and part else tensor


def apart(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Returns rows [heads · C, …] with the two numbers of rotary pair c at c and c + C/2, from neighbours in the
    file."""
    return tensor.reshape(heads, -1, 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


_GEMMA_NAMES = POST_NORMS | {'ffn_norm': 'pre_feedforward_layernorm'}

ARCHITECTURES = {
    'llama': Architecture('llama', interleaved=True),
    'qwen2': Architecture('qwen2'),
    'qwen3': Architecture('qwen3'),
    'smollm3': Architecture('smollm3', interleaved=True),
    'olmo2': Architecture('olmo2', names=POST_NORMS),
    'gemma': Architecture('gemma', gain_offset=1.0),
    'gemma2': Architecture('gemma2', gain_offset=1.0, names=_GEMMA_NAMES, scales_queries=True),
    'gemma3': Architecture('gemma3_text', gain_offset=1.0, names=_GEMMA_NAMES, scales_queries=True),
    'gpt2': Architecture(
        'gpt2', is_transposed=True, keys=GPT2_KEYS, layers='h', outside=GPT2_OUTSIDE, names=GPT2_TENSORS
    ),
}
"""`general.architecture` → what differs from Hugging Face's form."""


def describe(name: str, metadata: Hyperparameters, vocab_size: int, tied: bool) -> tuple[Hyperparameters, list[str]]:
    """Returns (config.json of the file, keys of the metadata that have a meaning which is not known).

    Args:
        name: of ARCHITECTURES.
        metadata: the keys behind 'name.', with their values.
        vocab_size: the rows of the embedding.
        tied: the file has no output matrix.
    """
    architecture = ARCHITECTURES[name]
    known = Hyperparameters(
        {architecture.keys[key]: value for key, value in metadata.items() if key in architecture.keys}
    )
    heads, width = metadata.integer('attention.head_count'), metadata.integer('embedding_length')
    size = metadata.integer('attention.key_length', width // heads)
    config = {'num_key_value_heads': heads, 'head_dim': size, 'rope_theta': 10_000.0} | known
    config |= {'vocab_size': vocab_size, 'tie_word_embeddings': tied}
    if (kind := metadata.get('rope.scaling.type', 'none')) != 'none':
        scaling = {theirs: metadata.get(key) for key, theirs in SCALING.items() if key in metadata}
        config |= {'rope_scaling': {'rope_type': kind, **scaling}}
    if (turned := metadata.integer('rope.dimension_count', size)) != size:
        config |= {'partial_rotary_factor': turned / size}
    if architecture.scales_queries:
        wide = config.integer('num_hidden_layers') in (46, 62)  # the 27B models take it from the width
        config |= {'query_pre_attn_scalar': width // heads if wide else size}
    config |= {'model_type': architecture.model_type}
    read = architecture.keys.keys() | SCALING.keys() | IGNORED
    unknown = sorted(key for key, value in metadata.items() if key not in read and value)
    if metadata.get('attention.value_length', size) != size:
        unknown.append('attention.value_length')
    return config, unknown
