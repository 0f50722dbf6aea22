"""Ministral."""

from lm.interop.families.decoder import Decoder
from lm.interop.families.mistral import Mistral


class Ministral(Mistral):
    """Mistral in which each layer has the window or has none."""

    model_types = ('ministral',)
    architecture = 'MinistralForCausalLM'
    describe = Decoder.describe
