"""Training objectives, one file each. Importing this package registers all of them."""

from lm.config.configurable import import_modules
from lm.training.objectives.base import Hiding, Objective, Unpack, check_objective
from lm.training.objectives.distillation import Distillation, Pair

import_modules(__name__, __path__)

__all__ = ['Distillation', 'Hiding', 'Objective', 'Pair', 'Unpack', 'check_objective']
