"""Retention of flash-linear-attention."""

from collections.abc import Mapping
from typing import ClassVar

from lm.interop.families.recurrent_decoder import RecurrentDecoder
from lm.interop.hyperparameters import Hyperparameters
from lm.model import ModelConfig
from lm.model.options import ResolvedLayer


class RetNet(RecurrentDecoder):
    """Retention (Sun et al. 2023): a constant factor per head, rotary positions, and no convolutions."""

    model_types = ('retnet',)
    architecture = 'RetNetForCausalLM'
    layer_type = 'multi_scale_retention'
    gain_names = ('g_norm_swish_gate', 'g_norm')
    defaults: ClassVar[Mapping[str, object]] = {
        'num_heads': 8,
        'expand_k': 1.0,
        'expand_v': 2.0,
        'hidden_ratio': 2,
        'use_output_gate': True,
    }
    fixed: ClassVar[Mapping[str, object]] = {'feature_map': None, 'elementwise_affine': True}

    def read(self, config: Hyperparameters) -> Hyperparameters:
        return super().read(config) | {'use_short_conv': False}  # their layers have none, whatever is said

    def differences(self, config: Hyperparameters) -> list[str]:
        found = self.read(config)
        sizes = self.sizes(found)
        fewer = ['fewer keys than queries'] if sizes.n_kv_heads != sizes.n_heads else []  # their factors are of queries
        return super().differences(config) + fewer

    def options(self, config: Hyperparameters) -> dict[str, object]:
        return super().options(config) | {'rotary_base': self.rotary_base}

    def describe_layer(self, options: ResolvedLayer, model: ModelConfig) -> dict[str, object]:
        return super().describe_layer(options, model) | {'num_kv_heads': options.heads.queries}
