"""Mistral."""

from collections.abc import Mapping
from typing import Any

from lm.interop.families.decoder import SLIDING, Decoder


class Mistral(Decoder):
    """Llama with a sliding window in all layers, or in none."""

    model_types = ('mistral',)
    architecture = 'MistralForCausalLM'

    def layer_types(self, config: Mapping[str, Any]) -> list[str]:
        return [SLIDING] * config['num_hidden_layers']

    def window(self, config: Mapping[str, Any]) -> int | None:
        return config.get('sliding_window', 4096)
