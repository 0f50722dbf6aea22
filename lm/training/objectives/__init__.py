"""Training objectives, one file each. Importing this package registers all of them."""

from lm.config.configurable import import_modules
from lm.training.objectives.base import Hiding, Objective, Unpack, check_objective
from lm.training.objectives.distillation import Comparison, Distillation, Pair, Reading

import_modules(__name__, __path__)

__all__ = ['Comparison', 'Distillation', 'Hiding', 'Objective', 'Pair', 'Reading', 'Unpack', 'check_objective']
