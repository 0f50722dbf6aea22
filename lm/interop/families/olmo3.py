"""OLMo 3."""

from lm.interop.families.decoder import FULL, SLIDING, count_layers
from lm.interop.families.olmo2 import Olmo2
from lm.interop.families.rotary_entry import RotaryEntry
from lm.interop.hyperparameters import Hyperparameters


class Olmo3(Olmo2):
    """OLMo 2 with a window in three layers of four; only the other layers may have scaled rotary positions."""

    model_types = ('olmo3',)
    architecture = 'Olmo3ForCausalLM'
    rotary_base = 500_000.0
    default_window = 4096
    turns_by_type = True

    def layer_types(self, config: Hyperparameters) -> list[str]:
        types = [FULL if i % 4 == 3 else SLIDING for i in count_layers(config)]
        return config.texts('layer_types') or types

    def rotary(self, config: Hyperparameters, layer_type: str = FULL) -> RotaryEntry:
        scaling = config.get('rope_scaling') if layer_type == FULL else None
        return RotaryEntry(config | {'rope_scaling': scaling}, self.rotary_base, layer_type)
