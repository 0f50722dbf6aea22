"""Granite 3."""

import dataclasses
import math

import numpy as np

from lm.attention import Attention
from lm.interop.families.base import Tensors
from lm.interop.families.decoder import Decoder
from lm.interop.hyperparameters import Hyperparameters
from lm.model import ModelConfig

BRANCHES = ('.attention_out.weight', '.glu_out.weight')


class Granite(Decoder):
    """Llama with factors of embeddings, scores, branches and logits. Matrices and gains take over the last two, which
    are 1 when it leaves."""

    model_types = ('granite',)
    architecture = 'GraniteForCausalLM'

    def options(self, config: Hyperparameters) -> dict[str, object]:
        return {'embedding_scale': config.number('embedding_multiplier', 1.0)}

    def attention(self, config: Hyperparameters, layer: int) -> Attention:
        scale = config.number('attention_multiplier', 1.0)
        return dataclasses.replace(super().attention(config, layer), scale=scale)

    def tensors(self, theirs: Tensors, config: Hyperparameters, model: ModelConfig) -> Tensors:
        ours, factor = super().tensors(theirs, config, model), np.float32(config.number('residual_multiplier', 1.0))
        gains = ours['final_norm.weight'] / np.float32(config.number('logits_scaling', 1.0))
        branches = {name: tensor * factor for name, tensor in ours.items() if name.endswith(BRANCHES)}
        return ours | branches | {'final_norm.weight': gains}

    def describe(self, model: ModelConfig) -> dict[str, object]:
        described, scale = super().describe(model), getattr(model.layers[0], 'scale', None)
        size = model.resolve(model.layers[0]).dims.head_dim
        return described | {
            'embedding_multiplier': math.sqrt(model.d_model)
            if model.embedding_scale is None
            else model.embedding_scale,
            'attention_multiplier': size**-0.5 if scale is None else scale,
        }
