"""Phi 3 and 4."""

import numpy as np

from lm.interop.families.decoder import Decoder
from lm.interop.families.exchange import Exchange
from lm.model import ModelConfig


class Phi3(Decoder):
    """Llama whose files have one matrix for queries, keys and values, and one for gates and values. It leaves as a
    Llama or Mistral."""

    model_types = ('phi3',)
    epsilon = 1e-5
    slides = True

    def exchange_attention(self, tensors: Exchange, model: ModelConfig, layer: int) -> None:
        tensors.move('qkv.weight', 'self_attn.qkv_proj.weight')
        tensors.move('attention_out.weight', 'self_attn.o_proj.weight')

    def exchange_units(self, tensors: Exchange, model: ModelConfig, layer: int) -> None:
        tensors.move('glu_in.weight', 'mlp.gate_up_proj.weight', _swap_halves, _swap_halves)
        tensors.move('glu_out.weight', 'mlp.down_proj.weight')


def _swap_halves(matrix: np.ndarray) -> np.ndarray:
    first, second = np.split(matrix, 2)
    return np.concatenate([second, first])
