"""Schedules of the learning rate, one file each. Importing this package registers all of them."""

import importlib
import pkgutil

from lm.training.schedules.base import Schedule

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f'{__name__}.{_module.name}')

__all__ = ['Schedule']
