"""Training objectives, one file each. Importing this package registers all of them."""

from lm.config.configurable import import_modules
from lm.training.objectives.base import Hiding, Objective, Unpack, check_objective

import_modules(__name__, __path__)

__all__ = ['Hiding', 'Objective', 'Unpack', 'check_objective']
