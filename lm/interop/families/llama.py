"""Llama 1 to 3.3, and models of its shape: SmolLM 1 and 2, TinyLlama, Yi and others."""

import numpy as np

from lm.interop.families.base import Tensors
from lm.interop.families.decoder import UNITS, Decoder, LayerTensors, cut
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

    def attention_tensors(self, theirs: LayerTensors, config: Hyperparameters, layer: int) -> Tensors:
        found = super().attention_tensors(theirs, config, layer)
        return found | ({'attention_out.bias': theirs.take(f'{OUT}.bias')} if theirs.has(f'{OUT}.bias') else {})

    def unit_tensors(self, theirs: LayerTensors, config: Hyperparameters, layer: int) -> Tensors:
        found = super().unit_tensors(theirs, config, layer)
        if not theirs.has(f'{UP}.bias'):
            return found
        return found | {'glu_in.bias': theirs.join([UP, GATE], 'bias'), 'glu_out.bias': theirs.take(f'{DOWN}.bias')}

    def layer(self, theirs: LayerTensors, config: Hyperparameters, layer: int) -> Tensors:
        found = super().layer(theirs, config, layer)
        if self.options(config)['biases']:
            for name in BIASED:
                found.setdefault(f'{name}.bias', np.zeros(found[f'{name}.weight'].shape[0], np.float32))
        return found

    def describe(self, model: ModelConfig) -> dict[str, object]:
        return super().describe(model) | {'attention_bias': model.biases, 'mlp_bias': model.biases}

    def attention_back(self, ours: Tensors, model: ModelConfig, layer: int) -> Tensors:
        found = super().attention_back(ours, model, layer)
        return found | ({f'{OUT}.bias': ours['attention_out.bias']} if model.biases else {})

    def unit_back(self, ours: Tensors, model: ModelConfig, layer: int) -> Tensors:
        found = super().unit_back(ours, model, layer)
        if not model.biases:
            return found
        halves = cut(ours['glu_in.bias'], [UP, GATE], [len(ours['glu_in.bias']) // 2], 'bias')
        return found | halves | {f'{DOWN}.bias': ours['glu_out.bias']}
