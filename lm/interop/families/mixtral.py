"""Mixtral."""

from typing import ClassVar

from lm.interop.families.decoder import FULL, SLIDING, count_layers
from lm.interop.families.expert_tensors import BALANCE
from lm.interop.families.mixture import ExpertDecoder
from lm.interop.hyperparameters import Hyperparameters
from lm.model import ModelConfig


class Mixtral(ExpertDecoder):
    """Mistral with experts in all layers."""

    model_types = ('mixtral',)
    architecture = 'MixtralForCausalLM'
    epsilon = 1e-5
    block = 'block_sparse_moe.'
    maps = ('w3', 'w1', 'w2')
    entries: ClassVar = {
        'n_experts': 'num_local_experts',
        'top_k': 'num_experts_per_tok',
        'hidden_dim': 'intermediate_size',
    }
    expert: ClassVar = {'num_local_experts': 8, 'num_experts_per_tok': 2, BALANCE: 0.001}
    normalizes = True

    def layer_types(self, config: Hyperparameters) -> list[str]:
        kind = FULL if self.window(config) is None else SLIDING
        return [kind for _ in count_layers(config)]

    def describe(self, model: ModelConfig) -> dict[str, object]:
        described = super().describe(model)
        del described['layer_types']
        return described
