"""Qwen 3 with experts."""

from typing import ClassVar

from lm.interop.families.decoder import FULL, count_layers
from lm.interop.families.mixture import ExpertDecoder
from lm.interop.families.qwen3 import Qwen3
from lm.interop.hyperparameters import Hyperparameters


class Qwen3Moe(ExpertDecoder, Qwen3):
    """Qwen 3 with experts, in all layers or some."""

    model_types = ('qwen3_moe',)
    architecture = 'Qwen3MoeForCausalLM'
    has_dense = True
    expert: ClassVar = {'num_experts': 128, 'num_experts_per_tok': 8, 'moe_intermediate_size': 768}

    def differences(self, config: Hyperparameters) -> list[str]:
        found = super().differences(config)
        return [*found, 'a sliding window'] if config.flag('use_sliding_window') else found

    def layer_types(self, config: Hyperparameters) -> list[str]:
        return [FULL for _ in count_layers(config)]
