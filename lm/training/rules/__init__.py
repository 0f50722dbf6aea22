"""Update rules, one file each. Importing this package registers all of them."""

from lm.config.configurable import import_modules
from lm.training.rules.base import Declared, Rule

import_modules(__name__, __path__)

__all__ = ['Declared', 'Rule']
