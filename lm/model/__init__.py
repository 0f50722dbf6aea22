"""The language model: its configuration, one layer, positions, and the whole."""

from lm.model.config import REMAT, ModelConfig
from lm.model.transformer import Transformer, build, make_seed_key

__all__ = ['REMAT', 'ModelConfig', 'Transformer', 'build', 'make_seed_key']
