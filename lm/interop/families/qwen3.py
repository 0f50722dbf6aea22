"""Qwen 3."""

from typing import ClassVar

from lm.interop.families.decoder import Decoder
from lm.interop.families.qwen2 import Qwen2


class Qwen3(Qwen2):
    """Llama with RMSNorm of each head's queries and keys, and heads of a size of their own; the upper layers may have a
    window."""

    model_types = ('qwen3',)
    architecture = 'Qwen3ForCausalLM'
    head_size = 128
    fields: ClassVar = {'qk_norm': True}
    norms: ClassVar = {**Decoder.norms, 'q_norm': 'self_attn.q_norm', 'k_norm': 'self_attn.k_norm'}
