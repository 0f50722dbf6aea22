"""Kimi delta attention of flash-linear-attention."""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from lm.interop.families.base import Tensors
from lm.interop.families.decoder import LayerTensors
from lm.interop.families.gated_deltanet import GatedDeltaNet
from lm.interop.families.recurrent_decoder import HeadSizes, cut_rows
from lm.interop.hyperparameters import Hyperparameters
from lm.model import ModelConfig
from lm.model.options import ResolvedLayer

GATE_BIAS = 'attn.g_proj.1.bias'
"""Their output gate has a bias. Ours has none: an export writes zeros, and another bias is left over in an import."""


class Kda(GatedDeltaNet):
    """Kimi delta attention (Kimi Team 2025) in all layers: a factor per channel, and a sigmoid gate of low rank."""

    model_types = ('kda',)
    architecture = 'KDAForCausalLM'
    defaults: ClassVar[Mapping[str, object]] = {
        'num_heads': 16,
        'head_dim': 128,
        'expand_v': 1.0,
        'use_short_conv': True,
        'use_gate': True,
        'output_gate_activation': 'sigmoid',
        'allow_neg_eigval': False,
    }
    fixed: ClassVar[Mapping[str, object]] = {
        'use_short_conv': True,
        'expand_v': 1.0,  # the matrices of factors and of gates have as many rows as a value has channels
        'safe_gate': False,
        'lower_bound': None,
    }

    def gate_options(self, config: Hyperparameters) -> dict[str, object]:
        return super().gate_options(config) | {'output_gate_rank': config.integer('head_dim')}

    def settings_of(self, config: Hyperparameters) -> dict[str, object]:
        return super().settings_of(config) | {'gate': 'channel'}

    def gate_tensors(self, theirs: LayerTensors) -> Tensors:
        bias = theirs.tensors.get(theirs.begin + GATE_BIAS)
        if bias is not None and not np.any(bias):
            theirs.take(GATE_BIAS)
        return {
            'output_gate.down.weight': theirs.take('attn.g_proj.0.weight'),
            'output_gate.up.weight': theirs.take('attn.g_proj.1.weight'),
        }

    def factor_tensors(self, theirs: LayerTensors, sizes: HeadSizes) -> Tensors:
        return {
            'mechanism_in.weight': theirs.join(['attn.b_proj', 'attn.f_proj.0']),
            'attention.gate.logits.weight': theirs.take('attn.f_proj.1.weight'),
            'attention.gate.logits.bias': theirs.take('attn.dt_bias').reshape(sizes.values, sizes.key_size),
            'attention.gate.log_rate': theirs.take('attn.A_log'),
        }

    def describe_layer(self, options: ResolvedLayer, model: ModelConfig) -> dict[str, object]:
        found = super().describe_layer(options, model)
        return {name: value for name, value in found.items() if name not in ('use_gate', 'output_gate_activation')}

    def gate_back(self, ours: Tensors) -> Tensors:
        up = ours['output_gate.up.weight']
        return {
            'attn.g_proj.0.weight': ours['output_gate.down.weight'],
            'attn.g_proj.1.weight': up,
            GATE_BIAS: np.zeros(len(up), np.float32),
        }

    def factors_back(self, ours: Tensors, options: ResolvedLayer) -> Tensors:
        return {
            **cut_rows(ours['mechanism_in.weight'], ['b_proj', 'f_proj.0'], options.dims.n_kv_heads),
            'attn.f_proj.1.weight': ours['attention.gate.logits.weight'],
            'attn.dt_bias': ours['attention.gate.logits.bias'].reshape(-1),
            'attn.A_log': ours['attention.gate.log_rate'],
        }
