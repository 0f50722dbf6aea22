"""Ministral."""

from lm.interop.families.mistral import Mistral


class Ministral(Mistral):
    """Mistral in which each layer has the window or has none."""

    model_types = ('ministral',)
    architecture = 'MinistralForCausalLM'
    names_types = True
