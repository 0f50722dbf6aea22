"""Sources of documents, one file each. Importing this package registers all of them."""

import importlib
import pkgutil

from lm.data.sources.base import Source

for _module in pkgutil.walk_packages(__path__, f'{__name__}.'):
    importlib.import_module(_module.name)

__all__ = ['Source']
