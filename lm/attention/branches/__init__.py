"""Parts of residual branches, one file each. Importing this package registers all of them."""

from lm.attention.branches.base import BranchPart
from lm.config.configurable import import_modules

import_modules(__name__, __path__)

__all__ = ['BranchPart']
