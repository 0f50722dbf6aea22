"""Half a period of a cosine down to a fraction of the peak (Loshchilov & Hutter, 2017, without restarts)."""

import optax

from lm.config.configurable import configurable
from lm.training.schedules.base import Falling


@configurable('cosine')
class Cosine(Falling):
    """The rate peak · (final_fraction + (1 − final_fraction) · (1 + cos(π t / steps)) / 2)."""

    def build(self, peak: float, steps: int) -> optax.Schedule:
        return optax.cosine_decay_schedule(peak, steps, self.final_fraction)
