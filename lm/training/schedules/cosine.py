"""Half a period of a cosine down to a fraction of the peak (Loshchilov & Hutter, 2017, without restarts)."""

import optax

from lm.config.configurable import configurable, field
from lm.training.schedules.base import Schedule


@configurable('cosine')
class Cosine(Schedule):
    """The rate peak · (final_fraction + (1 − final_fraction) · (1 + cos(π t / steps)) / 2)."""

    final_fraction: float = field(
        default=0.0,
        minimum=0,
        maximum=1,
        formerly='optimizer.final_fraction',
        help='last value as a fraction of the peak',
    )

    def build(self, peak: float, steps: int) -> optax.Schedule:
        return optax.cosine_decay_schedule(peak, steps, self.final_fraction)
