"""Gated linear attention of flash-linear-attention."""

from collections.abc import Mapping
from typing import ClassVar

from lm.interop.families.exchange import Exchange
from lm.interop.families.recurrent_decoder import RecurrentDecoder, move_bias
from lm.interop.hyperparameters import Hyperparameters
from lm.model.options import ResolvedLayer


class Gla(RecurrentDecoder):
    """Gated linear attention (Yang et al. 2024), a factor per channel of the key, made by a matrix of rank 16."""

    model_types = ('gla',)
    architecture = 'GLAForCausalLM'
    layer_type = 'gated_linear_attention'
    gain_names = ('g_norm_swish_gate', 'g_norm')
    defaults: ClassVar[Mapping[str, object]] = {
        'num_heads': 4,
        'expand_k': 0.5,
        'expand_v': 1.0,
        'use_short_conv': False,
        'use_output_gate': True,
    }
    fixed: ClassVar[Mapping[str, object]] = {'feature_map': None, 'clamp_min': None, 'elementwise_affine': True}

    def settings_of(self, config: Hyperparameters) -> dict[str, object]:
        return {'gate': 'channel'}

    def exchange_factors(self, tensors: Exchange, options: ResolvedLayer) -> None:
        tensors.move('mechanism_in.weight', 'attn.gk_proj.0.weight')
        tensors.move('attention.gate.logits.weight', 'attn.gk_proj.1.weight')
        move_bias(tensors, 'attn.gk_proj.1.bias', options)
