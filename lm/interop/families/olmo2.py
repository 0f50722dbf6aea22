"""OLMo 2."""

from typing import ClassVar

from lm.interop.families.decoder import Decoder
from lm.interop.hyperparameters import Hyperparameters


class Olmo2(Decoder):
    """Llama with normalizations of what attention and the linear units add, and of whole projections of queries and
    keys."""

    model_types = ('olmo2',)
    architecture = 'Olmo2ForCausalLM'
    epsilon = 1e-5
    norms: ClassVar = {
        'attention_out_norm': 'post_attention_layernorm',
        'glu_out_norm': 'post_feedforward_layernorm',
        'q_norm': 'self_attn.q_norm',
        'k_norm': 'self_attn.k_norm',
    }

    def options(self, config: Hyperparameters) -> dict[str, object]:
        return {'norm_placement': 'after', 'qk_norm': True, 'qk_norm_span': 'projection'}
