"""The inverse square root of the number of steps (Vaswani et al. 2017, §5.3)."""

import jax.numpy as jnp
import optax

from lm.config.configurable import configurable, field
from lm.training.schedules.base import Schedule


@configurable('inverse_square_root')
class InverseSquareRoot(Schedule):
    """peak · √(timescale / (timescale + t)), t updates after the warm-up."""

    timescale: int = field(default=10_000, minimum=1, help='updates after which the rate is peak / √2')

    # No rate depends on how many steps there will be. Leave this out where one does.
    is_open_ended = True

    def build(self, peak: float, steps: int) -> optax.Schedule:
        return lambda count: peak * jnp.sqrt(self.timescale / (self.timescale + count))
