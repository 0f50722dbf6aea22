"""Training objectives, one file each. Importing this package registers all of them."""

import importlib
import pkgutil

from lm.training.objectives.base import Hiding, Objective, Unpack, check_objective

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f'{__name__}.{_module.name}')

__all__ = ['Hiding', 'Objective', 'Unpack', 'check_objective']
