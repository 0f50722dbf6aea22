"""Llama 1 to 3.3, and models of its shape: SmolLM 1 and 2, TinyLlama, Yi and others."""

from lm.interop.families.decoder import Decoder


class Llama(Decoder):
    """The shared decoder as it is, with rotary positions that may be scaled."""

    model_types = ('llama',)
    architecture = 'LlamaForCausalLM'
