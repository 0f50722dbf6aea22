"""Trackers follow a run from outside: `train.trackers = [@tensorboard(), @webhook()]`, one file per tracker.

Importing this package registers all of them.
"""

from lm.config.configurable import import_modules
from lm.trackers.base import Tracker, Trackers, TrackerWriter

import_modules(__name__, __path__)

__all__ = ['Tracker', 'TrackerWriter', 'Trackers']
