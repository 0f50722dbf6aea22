"""OLMo 3."""

from collections.abc import Mapping
from typing import Any

from lm.interop.families.decoder import FULL, SLIDING
from lm.interop.families.olmo2 import Olmo2
from lm.interop.families.rotary_entry import RotaryEntry, describe_types
from lm.model import ModelConfig


class Olmo3(Olmo2):
    """OLMo 2 with a window in three layers of four; only the other layers may have scaled rotary positions."""

    model_types = ('olmo3',)
    architecture = 'Olmo3ForCausalLM'
    rotary_base = 500_000.0

    def layer_types(self, config: Mapping[str, Any]) -> list[str]:
        types = [FULL if i % 4 == 3 else SLIDING for i in range(config['num_hidden_layers'])]
        return config.get('layer_types') or types

    def window(self, config: Mapping[str, Any]) -> int | None:
        return config.get('sliding_window', 4096)

    def rotary(self, config: Mapping[str, Any], layer_type: str = FULL) -> RotaryEntry:
        scaling = config.get('rope_scaling') if layer_type == FULL else None
        return RotaryEntry({**config, 'rope_scaling': scaling}, self.rotary_base, layer_type)

    def describe(self, model: ModelConfig) -> dict[str, Any]:
        return super().describe(model) | {'rope_parameters': describe_types(model)}
