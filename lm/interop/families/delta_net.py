"""DeltaNet of flash-linear-attention."""

from collections.abc import Mapping
from typing import ClassVar

from lm.interop.families.exchange import Exchange
from lm.interop.families.recurrent_decoder import RecurrentDecoder
from lm.interop.hyperparameters import Hyperparameters
from lm.model import ModelConfig
from lm.model.options import ResolvedLayer


class DeltaNet(RecurrentDecoder):
    """DeltaNet (Yang et al. 2024): the delta rule without factors."""

    model_types = ('delta_net',)
    architecture = 'DeltaNetForCausalLM'
    layer_type = 'linear_attention'
    gate_entry = 'use_gate'
    defaults: ClassVar[Mapping[str, object]] = {
        'num_heads': 16,
        'expand_k': 1.0,
        'expand_v': 1.0,
        'use_short_conv': True,
        'use_gate': False,
        'allow_neg_eigval': False,
    }
    fixed: ClassVar[Mapping[str, object]] = {
        'use_short_conv': True,
        'use_beta': True,
        'qk_norm': 'l2',
        'qk_activation': 'silu',
    }

    def settings_of(self, config: Hyperparameters) -> dict[str, object]:
        return {'negative': config.flag('allow_neg_eigval')}

    def exchange_factors(self, tensors: Exchange, options: ResolvedLayer) -> None:
        tensors.move('mechanism_in.weight', 'attn.b_proj.weight')

    def describe_layer(self, options: ResolvedLayer, model: ModelConfig) -> dict[str, object]:
        found = super().describe_layer(options, model)
        del found['num_kv_heads']
        return found | {'allow_neg_eigval': getattr(model.layers[0], 'negative', False)}
