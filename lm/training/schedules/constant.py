"""A constant rate to the end."""

import optax

from lm.config.configurable import configurable
from lm.training.schedules.base import Schedule


@configurable('constant')
class Constant(Schedule):
    """The peak rate, at every step."""

    is_open_ended = True

    def build(self, peak: float, steps: int) -> optax.Schedule:
        return optax.constant_schedule(peak)
