"""Llama 1 to 3.3, and models of its shape: SmolLM 1 and 2, TinyLlama, Yi and others."""

import numpy as np

from lm.interop.families.decoder import UNITS, Decoder
from lm.interop.families.exchange import Exchange, Incoming
from lm.interop.hyperparameters import Hyperparameters
from lm.model import ModelConfig

OUT = 'self_attn.o_proj'
BIASED = ('qkv', 'attention_out', 'glu_in', 'glu_out')
"""The maps that have biases with `model.biases`."""
UP, GATE, DOWN = (f'mlp.{name}' for name in UNITS)


class Llama(Decoder):
    """The shared decoder as it is, with rotary positions that may be scaled. Attention and the linear units may have
    biases; if one of them has, the others become zeros here."""

    model_types = ('llama',)
    architecture = 'LlamaForCausalLM'
    takes_biases = True

    def options(self, config: Hyperparameters) -> dict[str, object]:
        return {'biases': config.flag('attention_bias') or config.flag('mlp_bias')}

    def exchange(self, tensors: Exchange, model: ModelConfig, layer: int) -> None:
        super().exchange(tensors, model, layer)
        if tensors.has('attention_out.bias', f'{OUT}.bias'):
            tensors.move('attention_out.bias', f'{OUT}.bias')
        if tensors.has('glu_in.bias', f'{UP}.bias'):
            tensors.join('glu_in', [UP, GATE], part='bias')
            tensors.move('glu_out.bias', f'{DOWN}.bias')
        if model.biases and isinstance(tensors, Incoming):
            for name in BIASED:
                rows = tensors.made[f'{name}.weight'].shape[0]
                tensors.made.setdefault(f'{name}.bias', np.zeros(rows, np.float32))

    def describe(self, model: ModelConfig) -> dict[str, object]:
        return super().describe(model) | {'attention_bias': model.biases, 'mlp_bias': model.biases}
