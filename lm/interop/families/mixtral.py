"""Mixtral."""

from typing import ClassVar

from lm.interop.families.mixture import ExpertDecoder


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
    expert: ClassVar = {'num_local_experts': 8, 'num_experts_per_tok': 2}
    normalizes = True
    slides = True
    names_types = False
