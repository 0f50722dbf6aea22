"""Qwen 3."""

from typing import ClassVar

from lm.interop.families.decoder import Decoder
from lm.interop.families.qwen2 import Qwen2
from lm.interop.hyperparameters import Hyperparameters


class Qwen3(Qwen2):
    """Llama with RMSNorm of each head's queries and keys, and heads of a size of their own; the upper layers may have a
    window."""

    model_types = ('qwen3',)
    architecture = 'Qwen3ForCausalLM'
    norms: ClassVar = {**Decoder.norms, 'q_norm': 'self_attn.q_norm', 'k_norm': 'self_attn.k_norm'}

    def options(self, config: Hyperparameters) -> dict[str, object]:
        return {'qk_norm': True}

    def head_dim(self, config: Hyperparameters) -> int:
        return config.integer('head_dim', 128)
