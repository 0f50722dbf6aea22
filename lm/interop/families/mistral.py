"""Mistral."""

from collections.abc import Mapping
from typing import Any

from lm.interop.families.decoder import SLIDING, Decoder
from lm.model import ModelConfig


class Mistral(Decoder):
    """Llama with a sliding window in all layers, or in none."""

    model_types = ('mistral',)
    architecture = 'MistralForCausalLM'

    def layer_types(self, config: Mapping[str, Any]) -> list[str]:
        return config.get('layer_types') or [SLIDING] * config['num_hidden_layers']

    def window(self, config: Mapping[str, Any]) -> int | None:
        return config.get('sliding_window', 4096)

    def describe(self, model: ModelConfig) -> dict[str, Any]:
        described = super().describe(model)
        del described['layer_types']  # transformers takes a Mistral with types of layers for a Ministral
        return described
