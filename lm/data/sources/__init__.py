"""Sources of documents, one file each. Importing this package registers all of them."""

import importlib
import pkgutil

from lm.data.sources.base import Source

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f'{__name__}.{_module.name}')

__all__ = ['Source']
