"""Gemma 1."""

from collections.abc import Mapping
from typing import Any

from lm.interop.families.decoder import Decoder
from lm.model import ModelConfig


class Gemma(Decoder):
    """Llama with gains of 1 + w, embeddings that are multiplied by the root of their width, and heads of a size of
    their own."""

    model_types = ('gemma',)
    architecture = 'GemmaForCausalLM'
    tied = True
    gain = 1.0

    def options(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {'embedding_scale': None}

    def head_dim(self, config: Mapping[str, Any]) -> int:
        return config.get('head_dim', 256)

    def find_activation(self, config: Mapping[str, Any]) -> str:
        """Returns tanh's GELU, whatever `hidden_act` is: transformers computes it for 'gelu' too."""
        name = config.get('hidden_activation') or config.get('hidden_act') or 'gelu'
        return 'gelu_pytorch_tanh' if name == 'gelu' else name

    def describe(self, model: ModelConfig) -> dict[str, Any]:
        return super().describe(model) | {'hidden_act': 'gelu_pytorch_tanh'}
