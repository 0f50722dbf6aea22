"""Qwen 2 and 2.5."""

from collections.abc import Mapping
from typing import Any

from lm.interop.families.decoder import FULL, SLIDING, Decoder


class Qwen2(Decoder):
    """Llama with biases of queries, keys and values; the upper layers may have a window."""

    model_types = ('qwen2',)
    architecture = 'Qwen2ForCausalLM'

    def options(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {'qkv_biases': True}

    def layer_types(self, config: Mapping[str, Any]) -> list[str]:
        layers, first = config['num_hidden_layers'], config.get('max_window_layers', 28)
        return config.get('layer_types') or [
            FULL if self.window(config) is None or i < first else SLIDING for i in range(layers)
        ]

    def window(self, config: Mapping[str, Any]) -> int | None:
        return config.get('sliding_window', 4096) if config.get('use_sliding_window') else None
