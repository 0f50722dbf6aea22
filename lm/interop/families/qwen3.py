"""Qwen 3."""

from collections.abc import Mapping
from typing import Any, ClassVar

from lm.interop.families.decoder import Decoder
from lm.interop.families.qwen2 import Qwen2


class Qwen3(Qwen2):
    """Llama with RMSNorm of each head's queries and keys, and heads of a size of their own; the upper layers may have a
    window."""

    model_types = ('qwen3',)
    architecture = 'Qwen3ForCausalLM'
    norms: ClassVar = {**Decoder.norms, 'q_norm': 'self_attn.q_norm', 'k_norm': 'self_attn.k_norm'}

    def options(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {'qk_norm': True}

    def head_dim(self, config: Mapping[str, Any]) -> int:
        return config.get('head_dim', 128)
