"""Mistral."""

from lm.interop.families.decoder import SLIDING, Decoder, count_layers
from lm.interop.hyperparameters import Hyperparameters


class Mistral(Decoder):
    """Llama with a sliding window in all layers, or in none."""

    model_types = ('mistral',)
    architecture = 'MistralForCausalLM'
    default_window = 4096
    names_types = False  # transformers takes a Mistral with types of layers for a Ministral

    def layer_types(self, config: Hyperparameters) -> list[str]:
        return config.texts('layer_types') or [SLIDING for _ in count_layers(config)]
