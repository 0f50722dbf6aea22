"""StarCoder 2."""

from typing import ClassVar

from lm.interop.families.base import Tensors
from lm.interop.families.decoder import QKV, Decoder
from lm.interop.families.exchange import Exchange
from lm.interop.hyperparameters import Hyperparameters
from lm.model import ModelConfig

MAPS = {'attention_out': 'self_attn.o_proj', 'glu_in': 'mlp.c_fc', 'glu_out': 'mlp.c_proj'}
"""Our maps without the one of queries, keys and values → theirs."""
PARTS = ('weight', 'bias')


class Starcoder2(Decoder):
    """Layer normalization, biases, GELU without gates, rotary positions; a window in all layers, or in none."""

    model_types = ('starcoder2',)
    architecture = 'Starcoder2ForCausalLM'
    activation = 'gelu_pytorch_tanh'
    tied = True
    slides = True
    names_types = False
    norm_epsilon: ClassVar[float] = 1e-5

    def options(self, config: Hyperparameters) -> dict[str, object]:
        epsilon = config.number('norm_epsilon', self.norm_epsilon)
        return {'norm': 'layer', 'norm_epsilon': epsilon, 'gated': False, 'biases': True}

    def differences(self, config: Hyperparameters) -> list[str]:
        found = super().differences(config)
        return found if config.flag('use_bias', True) else [*found, 'layer normalization without biases of maps']

    def tensors(self, theirs: Tensors, config: Hyperparameters, model: ModelConfig) -> Tensors:
        bias = theirs.pop('model.norm.bias')
        return super().tensors(theirs, config, model) | {'final_norm.bias': bias}

    def exchange(self, tensors: Exchange, model: ModelConfig, layer: int) -> None:
        rows = model.resolve(model.layers[layer]).qkv_sizes[:2]
        for part in PARTS:
            tensors.join('qkv', QKV, rows, part)
            for our, their in {**MAPS, **self.norms}.items():
                tensors.move(f'{our}.{part}', f'{their}.{part}')

    def describe(self, model: ModelConfig) -> dict[str, object]:
        return super().describe(model) | {'norm_epsilon': model.norm_epsilon}

    def back(self, ours: Tensors, model: ModelConfig) -> Tensors:
        return super().back(ours, model) | {'model.norm.bias': ours['final_norm.bias']}
