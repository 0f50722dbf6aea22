"""Qwen 1.5 and 2 with experts."""

from typing import ClassVar

from lm.interop.families.decoder import FULL, SLIDING, count_layers
from lm.interop.families.mixture import ExpertDecoder
from lm.interop.families.qwen2 import Qwen2
from lm.interop.hyperparameters import Hyperparameters


class Qwen2Moe(ExpertDecoder, Qwen2):
    """Qwen 2 with experts and a shared one that has a gate; every second of the lower layers may have a window."""

    model_types = ('qwen2_moe',)
    architecture = 'Qwen2MoeForCausalLM'
    has_dense = True
    shared = True
    entries: ClassVar = {**ExpertDecoder.entries, 'shared_dim': 'shared_expert_intermediate_size'}
    expert: ClassVar = {
        'num_experts': 60,
        'num_experts_per_tok': 4,
        'moe_intermediate_size': 1408,
        'shared_expert_intermediate_size': 5632,
    }

    def differences(self, config: Hyperparameters) -> list[str]:
        found = super().differences(config)
        return found if config.flag('qkv_bias', True) else [*found, 'no biases of queries, keys and values']

    def layer_types(self, config: Hyperparameters) -> list[str]:
        last = config.integer('max_window_layers', 28)
        return config.texts('layer_types') or [
            SLIDING if self.window(config) is not None and i % 2 == 0 and i < last else FULL
            for i in count_layers(config)
        ]
