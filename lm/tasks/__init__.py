"""Tasks, most of them synthetic, one file each. Importing this package registers all of them."""

import importlib
import pkgutil

from lm.tasks.base import Task, TaskStore

for _module in pkgutil.walk_packages(__path__, f'{__name__}.'):
    importlib.import_module(_module.name)

__all__ = ['Task', 'TaskStore']
