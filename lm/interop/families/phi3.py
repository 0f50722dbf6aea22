"""Phi 3 and 4."""

import numpy as np

from lm.interop.families.base import Tensors
from lm.interop.families.decoder import FULL, SLIDING, Decoder, LayerTensors, count_layers
from lm.interop.hyperparameters import Hyperparameters


class Phi3(Decoder):
    """Llama whose files have one matrix for queries, keys and values, and one for gates and values. It leaves as a
    Llama or Mistral."""

    model_types = ('phi3',)
    epsilon = 1e-5

    def layer_types(self, config: Hyperparameters) -> list[str]:
        kind = FULL if self.window(config) is None else SLIDING
        return [kind for _ in count_layers(config)]

    def attention_tensors(self, theirs: LayerTensors, config: Hyperparameters, layer: int) -> Tensors:
        return {
            'qkv.weight': theirs.take('self_attn.qkv_proj.weight'),
            'attention_out.weight': theirs.take('self_attn.o_proj.weight'),
        }

    def unit_tensors(self, theirs: LayerTensors, config: Hyperparameters, layer: int) -> Tensors:
        gates, values = np.split(theirs.take('mlp.gate_up_proj.weight'), 2)
        return {
            'glu_in.weight': np.concatenate([values, gates]),
            'glu_out.weight': theirs.take('mlp.down_proj.weight'),
        }
