"""A straight line down to a fraction of the peak; the paper's line ends at zero (PolySketchFormer, App. G, I)."""

import optax

from lm.config.configurable import configurable
from lm.training.schedules.base import Falling


@configurable('linear')
class Linear(Falling):
    """The rate peak · (1 − (1 − final_fraction) · t / steps)."""

    def build(self, peak: float, steps: int) -> optax.Schedule:
        return optax.linear_schedule(peak, peak * self.final_fraction, steps)
