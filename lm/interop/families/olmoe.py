"""OLMoE."""

from typing import ClassVar

from lm.interop.families.decoder import Decoder
from lm.interop.families.mixture import ExpertDecoder
from lm.interop.hyperparameters import Hyperparameters


class Olmoe(ExpertDecoder):
    """Llama with experts in all layers and normalizations of whole projections of queries and keys."""

    model_types = ('olmoe',)
    architecture = 'OlmoeForCausalLM'
    epsilon = 1e-5
    norms: ClassVar = {**Decoder.norms, 'q_norm': 'self_attn.q_norm', 'k_norm': 'self_attn.k_norm'}
    entries: ClassVar = {**ExpertDecoder.entries, 'hidden_dim': 'intermediate_size'}
    expert: ClassVar = {'num_experts': 64, 'num_experts_per_tok': 8}
    balance = 0.01
    fields: ClassVar = {'qk_norm': True, 'qk_norm_span': 'projection'}

    def differences(self, config: Hyperparameters) -> list[str]:
        found = super().differences(config)
        return found if config.get('clip_qkv') is None else [*found, 'a limit of queries, keys and values (clip_qkv)']
