"""Gemma 3, its models of text."""

from typing import ClassVar

from lm.interop.families.decoder import FULL, SLIDING
from lm.interop.families.gemma2 import Gemma2
from lm.interop.families.rotary_entry import RotaryEntry
from lm.interop.hyperparameters import Hyperparameters


class Gemma3(Gemma2):
    """Gemma 2 with RMSNorm of each head's queries and keys, without caps; one layer of six sees all tokens, and has
    another base of rotary positions."""

    model_types = ('gemma3_text',)
    architecture = 'Gemma3ForCausalLM'
    rotary_base = 1_000_000.0
    norms: ClassVar = {**Gemma2.norms, 'q_norm': 'self_attn.q_norm', 'k_norm': 'self_attn.k_norm'}
    caps: ClassVar = {'attn_logit_softcapping': None, 'final_logit_softcapping': None}
    has_score_cap = False  # `transformers` keeps the entry, and computes without it
    every = 6
    turns_by_type = True
    fields: ClassVar = {**Gemma2.fields, 'qk_norm': True}

    def rotary(self, config: Hyperparameters, layer_type: str = FULL) -> RotaryEntry:
        if layer_type == FULL:
            return super().rotary(config)
        local = config | {'rope_theta': config.get('rope_local_base_freq'), 'rope_scaling': None}
        return RotaryEntry(local, 10_000.0, SLIDING)
