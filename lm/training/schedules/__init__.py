"""Schedules of the learning rate, one file each. Importing this package registers all of them."""

from lm.config.configurable import import_modules
from lm.training.schedules.base import Schedule

import_modules(__name__, __path__)

__all__ = ['Schedule']
