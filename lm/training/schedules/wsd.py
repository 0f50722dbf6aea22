"""Warm-up, stable, decay: the peak for most of the training, then down over its last share (Hu et al., MiniCPM, 2024,
§4; the shapes are compared by Hägele et al., "Scaling Laws and Compute-Optimal Training Beyond Fixed Training
Durations", 2024).

Before the decay no learning rate depends on `train.steps`: one run at the peak is the trunk of many lengths, each a
short branch (`lm train --branch_from`).
"""

import jax.numpy as jnp
import optax

from lm.config.configurable import configurable, field
from lm.errors import ConfigError
from lm.training.schedules.base import Schedule

SHARE = 0.1
"""The default of `decay_share`."""
SHAPES = {
    'linear': lambda t: 1 - t,
    'cosine': lambda t: (1 + jnp.cos(jnp.pi * t)) / 2,
    'sqrt': lambda t: 1 - jnp.sqrt(t),
}
"""Fraction of the decay that is done → the remaining fraction of the way from the peak to the last value."""


@configurable('wsd')
class Wsd(Schedule):
    """A constant rate with a final decay (warmup-stable-decay).

    The decay covers the last `decay_share` of the updates after the warm-up, or the last `decay_steps` of them. There
    the rate is peak · (final_fraction + (1 − final_fraction) · shape(t)), and t goes from 0 to 1.
    """

    decay_share: float = field(default=SHARE, above=0, maximum=1, help='of the updates after the warm-up')
    decay_steps: int | None = field(
        default=None, minimum=1, help='updates of the decay, in place of `decay_share`: 5000 for a branch of 5000 steps'
    )
    shape: str = field(default='linear', choices=tuple(SHAPES), help="how it goes down; 'sqrt' is 1 − √t")
    final_fraction: float = field(default=0.0, minimum=0, maximum=1, help='last value as a fraction of the peak')

    def __post_init__(self):
        if self.decay_steps is not None and self.decay_share != SHARE:
            raise ConfigError(
                f'wsd.decay_steps = {self.decay_steps} and wsd.decay_share = {self.decay_share}: give one of them'
            )

    def build(self, peak: float, steps: int) -> optax.Schedule:
        decay = max(1, round(self.decay_share * steps)) if self.decay_steps is None else self.decay_steps
        if decay > steps:
            raise ConfigError(f'wsd.decay_steps = {decay}: more than the {steps} updates after the warm-up; shorten it')

        def rate(count):
            t = jnp.clip((count - (steps - decay)) / decay, 0.0, 1.0)
            return peak * (self.final_fraction + (1 - self.final_fraction) * SHAPES[self.shape](t))

        return rate
