"""SmolLM 3."""

import dataclasses

from lm.attention import Attention
from lm.interop.families.decoder import FULL, SLIDING, Decoder, count_layers
from lm.interop.hyperparameters import Hyperparameters
from lm.model import ModelConfig


class SmolLm3(Decoder):
    """Llama with layers that have no positions."""

    model_types = ('smollm3',)
    architecture = 'SmolLM3ForCausalLM'
    rotary_base = 2_000_000.0
    tied = True

    def layer_types(self, config: Hyperparameters) -> list[str]:
        window = self.window(config)
        types = [FULL if window is None or turned else SLIDING for turned in self.turned(config)]
        return config.texts('layer_types') or types

    def window(self, config: Hyperparameters) -> int | None:
        return config.find_integer('sliding_window') if config.flag('use_sliding_window') else None

    def turned(self, config: Hyperparameters) -> list[int]:
        """Returns 1 for each layer with rotary positions, and 0 for each without."""
        every = config.integer('no_rope_layer_interval', 4)
        turned = [int((i + 1) % every != 0) for i in count_layers(config)]
        return config.integers('no_rope_layers') or turned

    def attention(self, config: Hyperparameters, layer: int) -> Attention:
        one = super().attention(config, layer)
        return one if self.turned(config)[layer] else dataclasses.replace(one, rotary_base=None)

    def describe(self, model: ModelConfig) -> dict[str, object]:
        turned = [int(model.resolve(one).rotary is not None) for one in model.layers]
        return super().describe(model) | {'no_rope_layers': turned}
