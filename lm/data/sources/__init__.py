"""Sources of documents, one file each. Importing this package registers all of them."""

from lm.config.configurable import import_modules
from lm.data.sources.base import Source

import_modules(__name__, __path__)

__all__ = ['Source']
