"""Qwen 2 and 2.5."""

from collections.abc import Mapping
from typing import ClassVar

from lm.interop.families.decoder import FULL, SLIDING, Decoder, count_layers
from lm.interop.hyperparameters import Hyperparameters


class Qwen2(Decoder):
    """Llama with biases of queries, keys and values; the upper layers may have a window."""

    model_types = ('qwen2',)
    architecture = 'Qwen2ForCausalLM'
    fields: ClassVar[Mapping[str, object]] = {'qkv_biases': True}

    def layer_types(self, config: Hyperparameters) -> list[str]:
        first = config.integer('max_window_layers', 28)
        return config.texts('layer_types') or [
            FULL if self.window(config) is None or i < first else SLIDING for i in count_layers(config)
        ]

    def window(self, config: Hyperparameters) -> int | None:
        return config.find_integer('sliding_window', 4096) if config.flag('use_sliding_window') else None
