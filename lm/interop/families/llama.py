"""Llama 1 to 3, and Mistral without its sliding window."""

import math
import pathlib
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from lm.interop.families.base import Family, Tensors
from lm.model import ModelConfig


class Llama(Family):
    """The shape of Llama 1 to 3 and Mistral: RMSNorm, gated linear units, rotary positions, grouped queries.

    Embeddings are tied or not.
    """

    model_types = ('llama', 'mistral')
    ACTIVATIONS: ClassVar = {'silu': 'silu', 'gelu_new': 'gelu', 'gelu_pytorch_tanh': 'gelu'}

    def differences(self, config: Mapping[str, Any]) -> list[str]:
        rope = _rope(config)
        epsilon = config.get('rms_norm_eps', 1e-6)
        found = {
            f'rms_norm_eps = {epsilon} (here 1e-05)': not math.isclose(epsilon, 1e-5, rel_tol=1e-3),
            f'hidden_act = {config.get("hidden_act")!r}': config.get('hidden_act', 'silu') not in self.ACTIVATIONS,
            f'rotary positions scaled by {rope.get("type")!r}': rope.get('type') not in (None, 'default'),
            'rotary positions on a part of a head': config.get('partial_rotary_factor', 1.0) != 1.0,
            'biases in attention': bool(config.get('attention_bias')),
            'biases in the linear units': bool(config.get('mlp_bias')),
            'attention in a sliding window': config.get('sliding_window') is not None,
            'quantized weights': config.get('quantization_config') is not None,
        }
        return [what for what, differs in found.items() if differs]

    def model(self, folder: pathlib.Path, config: Mapping[str, Any], allow_imports: bool = False) -> ModelConfig:
        heads = config['num_attention_heads']
        return ModelConfig(
            vocab_size=config['vocab_size'],
            n_layers=config['num_hidden_layers'],
            d_model=config['hidden_size'],
            n_heads=heads,
            n_kv_heads=config.get('num_key_value_heads') or heads,
            head_dim=config.get('head_dim') or config['hidden_size'] // heads,
            hidden_dim=config['intermediate_size'],
            norm='rms',
            activation=self.ACTIVATIONS[config.get('hidden_act', 'silu')],
            sinusoids=False,
            rotary_base=float(_rope(config)['base']),
            tied=bool(config.get('tie_word_embeddings', False)),
        )

    def tensors(self, theirs: Tensors, config: Mapping[str, Any]) -> Tensors:
        for name in [name for name in theirs if name.endswith('rotary_emb.inv_freq')]:
            del theirs[name]  # old files keep it, but the configuration determines it
        root = math.sqrt(config['hidden_size'])
        # Models here multiply embeddings by √D at the input. Where the embedding is also the output matrix, the gain
        # before it compensates for the division.
        tied = bool(config.get('tie_word_embeddings', False))
        ours = {
            'embedding.weight': theirs.pop('model.embed_tokens.weight') / root,
            'final_norm.weight': theirs.pop('model.norm.weight') * (root if tied else 1.0),
        }
        if tied:
            theirs.pop('lm_head.weight', None)
        else:
            ours['head.weight'] = theirs.pop('lm_head.weight')
        for i in range(config['num_hidden_layers']):
            take = lambda name, i=i: theirs.pop(f'model.layers.{i}.{name}.weight')  # noqa: E731
            ours |= {
                f'layers.{i}.attention_norm.weight': take('input_layernorm'),
                f'layers.{i}.qkv.weight': np.concatenate([take(f'self_attn.{x}_proj') for x in 'qkv']),
                f'layers.{i}.attention_out.weight': take('self_attn.o_proj'),
                f'layers.{i}.glu_norm.weight': take('post_attention_layernorm'),
                f'layers.{i}.glu_in.weight': np.concatenate([take('mlp.up_proj'), take('mlp.gate_proj')]),
                f'layers.{i}.glu_out.weight': take('mlp.down_proj'),
            }
        return ours


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns base and kind of the rotary positions, which transformers 4 and 5 write in different places."""
    new = config.get('rope_parameters') or {}
    old = config.get('rope_scaling') or {}
    kinds = [entry.get('rope_type', entry.get('type')) for entry in (new, old)]
    base = new.get('rope_theta', config.get('rope_theta', 10_000.0))
    return {'base': base, 'type': next((kind for kind in kinds if kind not in (None, 'default')), None)}
