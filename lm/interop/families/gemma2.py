"""Gemma 2."""

import dataclasses
from typing import ClassVar

from lm.attention import Attention
from lm.interop.families.decoder import FULL, SLIDING, count_layers
from lm.interop.families.gemma import Gemma
from lm.interop.hyperparameters import Hyperparameters
from lm.model import ModelConfig


class Gemma2(Gemma):
    """Gemma with normalizations before and after, soft caps of scores and logits, and a window in every second
    layer."""

    model_types = ('gemma2',)
    architecture = 'Gemma2ForCausalLM'
    norms: ClassVar = {
        'attention_norm': 'input_layernorm',
        'attention_out_norm': 'post_attention_layernorm',
        'glu_norm': 'pre_feedforward_layernorm',
        'glu_out_norm': 'post_feedforward_layernorm',
    }
    fields: ClassVar = {**Gemma.fields, 'norm_placement': 'both'}
    default_window = 4096
    caps: ClassVar = {'attn_logit_softcapping': 50.0, 'final_logit_softcapping': 30.0}
    """The soft caps where config.json states none."""
    has_score_cap: ClassVar[bool] = True
    every: ClassVar[int] = 2
    """One layer of this many sees all tokens."""

    def options(self, config: Hyperparameters) -> dict[str, object]:
        cap = (self.caps | config).find_number('final_logit_softcapping')
        return {**super().options(config), 'logit_cap': cap}

    def layer_types(self, config: Hyperparameters) -> list[str]:
        every = config.find_integer('sliding_window_pattern') or self.every
        types = [FULL if i % every == every - 1 else SLIDING for i in count_layers(config)]
        return config.texts('layer_types') or types

    def attention(self, config: Hyperparameters, layer: int) -> Attention:
        size = config.integer('query_pre_attn_scalar', 256)
        scale = None if size == self.head_dim(config) else size**-0.5
        cap = (self.caps | config).find_number('attn_logit_softcapping') if self.has_score_cap else None
        return dataclasses.replace(super().attention(config, layer), scale=scale, score_cap=cap)

    def find_activation(self, config: Hyperparameters) -> str:
        """Returns their name of the activation."""
        return config.find_text('hidden_activation') or 'gelu_pytorch_tanh'

    def describe(self, model: ModelConfig) -> dict[str, object]:
        scale, cap = (getattr(model.pattern[0], name, None) for name in ('scale', 'score_cap'))
        shared = super().describe(model)
        return shared | {
            'hidden_activation': 'gelu_pytorch_tanh',
            'query_pre_attn_scalar': model.layer.head_dim if scale is None else round(scale**-2),
            'attn_logit_softcapping': cap if self.has_score_cap else None,
            'sliding_window': shared['sliding_window'] or 4096,  # read even where no layer has one
            'final_logit_softcapping': model.logit_cap,
        }
