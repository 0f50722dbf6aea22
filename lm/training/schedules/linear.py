"""A straight line down to a fraction of the peak; the paper's line ends at zero (PolySketchFormer, App. G, I)."""

import optax

from lm.config.configurable import configurable, field
from lm.training.schedules.base import Schedule


@configurable('linear')
class Linear(Schedule):
    """The rate peak · (1 − (1 − final_fraction) · t / steps)."""

    final_fraction: float = field(
        default=0.0,
        minimum=0,
        maximum=1,
        formerly='optimizer.final_fraction',
        help='last value as a fraction of the peak',
    )

    def build(self, peak: float, steps: int) -> optax.Schedule:
        return optax.linear_schedule(peak, peak * self.final_fraction, steps)
