"""Attention mechanisms, one file each. Importing this package registers all of them."""

from lm.attention.base import Attention, AttentionModule, HeadDims
from lm.config.configurable import REGISTRY, import_modules

import_modules(__name__, __path__)


def mechanisms() -> dict[str, type[Attention]]:
    """Returns gin name → configuration of every mechanism."""
    return {name: cls for name, cls in REGISTRY.items() if issubclass(cls, Attention)}


(DEFAULT,) = (cls for cls in mechanisms().values() if cls.is_default)

__all__ = ['DEFAULT', 'Attention', 'AttentionModule', 'HeadDims', 'mechanisms']
