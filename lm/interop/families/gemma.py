"""Gemma 1."""

from collections.abc import Mapping
from typing import ClassVar

from lm.interop.families.decoder import Decoder
from lm.interop.hyperparameters import Hyperparameters
from lm.model import ModelConfig


class Gemma(Decoder):
    """Llama with gains of 1 + w, embeddings that are multiplied by the root of their width, and heads of a size of
    their own."""

    model_types = ('gemma',)
    architecture = 'GemmaForCausalLM'
    tied = True
    gain = 1.0
    head_size = 256
    fields: ClassVar[Mapping[str, object]] = {'embedding_scale': None}

    def find_activation(self, config: Hyperparameters) -> str:
        """Returns tanh's GELU, whatever `hidden_act` is: transformers computes it for 'gelu' too."""
        name = config.find_text('hidden_activation') or config.find_text('hidden_act') or 'gelu'
        return 'gelu_pytorch_tanh' if name == 'gelu' else name

    def describe(self, model: ModelConfig) -> dict[str, object]:
        return super().describe(model) | {'hidden_act': 'gelu_pytorch_tanh'}
