"""Schedules: configurations that a gin file names. A schedule gives the learning rate after the warm-up.

Adding a schedule means adding one file. The peak and the warm-up are the same for all of them and belong to
`lm.training.optimizer`.
"""

import optax

from lm.config.configurable import Configurable, configurable_base, field


class Schedule(Configurable):
    """Base of the schedules (frozen dataclasses made by `@configurable`)."""

    gin_rewind = True

    def build(self, peak: float, steps: int) -> optax.Schedule:
        """Returns updates since the end of the warm-up → learning rate, from `peak` on, for `steps` updates."""
        raise NotImplementedError


@configurable_base
class Falling(Schedule):
    """Base of the schedules that fall to a fraction of the peak."""

    final_fraction: float = field(
        default=0.0,
        minimum=0,
        maximum=1,
        formerly='optimizer.final_fraction',
        help='last value as a fraction of the peak',
    )
