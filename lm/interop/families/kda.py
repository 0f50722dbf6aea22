"""Kimi delta attention of flash-linear-attention."""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from lm.interop.deferred import Deferred
from lm.interop.families.exchange import Exchange, Incoming, Outgoing
from lm.interop.families.gated_deltanet import GatedDeltaNet
from lm.interop.families.recurrent_decoder import move_bias
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

    def exchange_gate(self, tensors: Exchange) -> None:
        tensors.move('output_gate.down.weight', 'attn.g_proj.0.weight')
        tensors.move('output_gate.up.weight', 'attn.g_proj.1.weight')
        if isinstance(tensors, Outgoing):
            size = len(tensors.ours['output_gate.up.weight'])
            tensors.made[GATE_BIAS] = Deferred([size], lambda: np.zeros(size, np.float32))  # pyright: ignore
        elif isinstance(tensors, Incoming) and not np.any(tensors.theirs.get(place := tensors.begin + GATE_BIAS, 0)):
            tensors.theirs.pop(place, None)

    def exchange_factors(self, tensors: Exchange, options: ResolvedLayer) -> None:
        tensors.join('mechanism_in', ['attn.b_proj', 'attn.f_proj.0'], [options.dims.n_kv_heads])
        tensors.move('attention.gate.logits.weight', 'attn.f_proj.1.weight')
        move_bias(tensors, 'attn.dt_bias', options)
        tensors.move('attention.gate.log_rate', 'attn.A_log')

    def describe_layer(self, options: ResolvedLayer, model: ModelConfig) -> dict[str, object]:
        found = super().describe_layer(options, model)
        return {name: value for name, value in found.items() if name not in ('use_gate', 'output_gate_activation')}
