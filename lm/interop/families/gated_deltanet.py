"""Gated DeltaNet of flash-linear-attention."""

import math
from collections.abc import Mapping
from typing import ClassVar

from lm.attention.options import LayerOptions
from lm.interop.families.exchange import Exchange
from lm.interop.families.recurrent_decoder import RecurrentDecoder
from lm.interop.hyperparameters import Hyperparameters
from lm.model import ModelConfig
from lm.model.options import ResolvedLayer


class GatedDeltaNet(RecurrentDecoder):
    """Gated DeltaNet (Yang et al. 2025), the delta rule with a factor per head. Values may outnumber keys."""

    model_types = ('gated_deltanet',)
    architecture = 'GatedDeltaNetForCausalLM'
    layer_type = 'linear_attention'
    gate_entry = 'use_gate'
    defaults: ClassVar[Mapping[str, object]] = {
        'num_heads': 6,
        'head_dim': 256,
        'expand_v': 2.0,
        'use_short_conv': True,
        'use_gate': True,
        'output_gate_activation': 'swish',
        'allow_neg_eigval': False,
    }
    fixed: ClassVar[Mapping[str, object]] = {'use_short_conv': True}

    def sizes(self, config: Hyperparameters) -> LayerOptions:
        heads, size = config.integer('num_heads'), config.integer('head_dim')
        values, value = config.find_integer('num_v_heads') or heads, round(size * config.number('expand_v'))
        return LayerOptions(
            n_heads=heads,
            n_kv_heads=heads,
            n_value_heads=None if values == heads else values,
            head_dim=size,
            value_dim=None if value == size else value,
        )

    def gate_options(self, config: Hyperparameters) -> dict[str, object]:
        form = config.text('output_gate_activation')
        return super().gate_options(config) | {'output_gate_form': {'swish': 'silu'}.get(form, form)}

    def settings_of(self, config: Hyperparameters) -> dict[str, object]:
        return {'gate': True, 'negative': config.flag('allow_neg_eigval')}

    def exchange_factors(self, tensors: Exchange, options: ResolvedLayer) -> None:
        tensors.join('mechanism_in', ['attn.b_proj', 'attn.a_proj'], [options.dims.n_kv_heads])
        tensors.move('attention.gate.bias', 'attn.dt_bias')
        tensors.move('attention.gate.log_rate', 'attn.A_log')

    def describe_layer(self, options: ResolvedLayer, model: ModelConfig) -> dict[str, object]:
        heads, dims = options.heads, options.dims
        return {
            'num_heads': heads.queries,
            'num_v_heads': math.lcm(heads.queries, heads.values),  # more than `values` where keys are fewer
            'head_dim': dims.head_dim,
            'expand_v': dims.value_size / dims.head_dim,
            self.gate_entry: options.output_gate,
            'output_gate_activation': 'sigmoid' if options.output_gate_form == 'sigmoid' else 'swish',
            'allow_neg_eigval': getattr(model.layers[0], 'negative', False),
        }
