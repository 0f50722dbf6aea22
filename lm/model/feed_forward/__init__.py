"""Feed-forward layers, one file each. Importing this package registers all of them."""

from lm.config.configurable import import_modules
from lm.model.feed_forward.base import FeedForward, FeedForwardShape
from lm.model.feed_forward.dense import DenseLayer

import_modules(__name__, __path__)

__all__ = ['DenseLayer', 'FeedForward', 'FeedForwardShape']
