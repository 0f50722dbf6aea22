"""Tasks, most of them synthetic, one file each. Importing this package registers all of them."""

from lm.config.configurable import import_modules
from lm.tasks.base import Task, TaskStore

import_modules(__name__, __path__)

__all__ = ['Task', 'TaskStore']
