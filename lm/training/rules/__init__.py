"""Update rules, one file each. Importing this package registers all of them."""

import importlib
import pkgutil

from lm.training.rules.base import Declared, Rule

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f'{__name__}.{_module.name}')

__all__ = ['Declared', 'Rule']
