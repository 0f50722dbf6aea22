"""Attention mechanisms, one file each. Importing this package registers all of them."""

from lm.attention.base import Attention, AttentionModule, HeadDims
from lm.config.configurable import REGISTRY, import_modules

import_modules(__name__, __path__)


def mechanisms() -> dict[str, type[Attention]]:
    """Returns gin name → configuration of every mechanism."""
    return {name: cls for name, cls in REGISTRY.items() if issubclass(cls, Attention)}


def find_layer_type(layer_type: str) -> type[Attention]:
    """Returns the mechanism of a type of layers in published models (`Attention.layer_type`)."""
    (found,) = (cls for cls in mechanisms().values() if cls.layer_type == layer_type)
    return found


(DEFAULT,) = (cls for cls in mechanisms().values() if cls.is_default)

__all__ = ['DEFAULT', 'Attention', 'AttentionModule', 'HeadDims', 'find_layer_type', 'mechanisms']
