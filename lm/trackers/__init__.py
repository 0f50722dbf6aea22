"""Trackers follow a run from outside: `train.trackers = [@tensorboard(), @webhook()]`, one file per tracker.

Importing this package registers all of them.
"""

import importlib
import pkgutil

from lm.trackers.base import Tracker, Trackers, TrackerWriter

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f'{__name__}.{_module.name}')

__all__ = ['Tracker', 'TrackerWriter', 'Trackers']
