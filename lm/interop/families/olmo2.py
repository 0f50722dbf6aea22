"""OLMo 2."""

from typing import ClassVar

from lm.interop.families.decoder import Decoder


class Olmo2(Decoder):
    """Llama with normalizations of what attention and the linear units add, and of whole projections of queries and
    keys."""

    model_types = ('olmo2',)
    architecture = 'Olmo2ForCausalLM'
    epsilon = 1e-5
    fields: ClassVar = {'norm_placement': 'after', 'qk_norm': True, 'qk_norm_span': 'projection'}
    norms: ClassVar = {
        'attention_out_norm': 'post_attention_layernorm',
        'glu_out_norm': 'post_feedforward_layernorm',
        'q_norm': 'self_attn.q_norm',
        'k_norm': 'self_attn.k_norm',
    }
