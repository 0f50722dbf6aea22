"""Scaled rotary positions: frequencies that are changed for contexts longer than the first ones of a model.

Each scaling maps the frequencies θ_c = base^(-2c / C) of the C / 2 pairs of a head, in turns per 2π tokens.
"""

import abc
import math

import jax
import jax.numpy as jnp

from lm.config.configurable import Configurable, configurable, field
from lm.errors import ConfigError


class RotaryScaling(Configurable, abc.ABC):
    """Base of the scalings."""

    @abc.abstractmethod
    def scale(self, frequencies: jax.Array, base: float) -> jax.Array:
        """Returns the frequencies [C/2] that replace `frequencies`, which have the base `base`."""

    @property
    def amplitude(self) -> float:
        """The factor of cosine and sine."""
        return 1.0


@configurable('linear_rotary')
class LinearRotary(RotaryScaling):
    """Divides all frequencies (Chen et al. 2023, position interpolation, eq. 4)."""

    factor: float = field(default=8.0, minimum=1, help='divisor of the frequencies')

    def scale(self, frequencies: jax.Array, base: float) -> jax.Array:
        return frequencies / self.factor


@configurable('llama3_rotary')
class Llama3Rotary(RotaryScaling):
    """Divides the frequencies that turn too rarely in the first context length, as in Llama 3.1.

    Frequencies between the two limits are divided in part. (Grattafiori et al. 2024, §3.4.2; the limits are in the
    authors' code.)
    """

    factor: float = field(default=8.0, minimum=1, help='divisor of the low frequencies')
    low_turns: float = field(default=1.0, above=0, help='turns per first context, below which a frequency is divided')
    high_turns: float = field(default=4.0, above=0, help='turns per first context, above which a frequency is kept')
    length: int = field(default=8192, minimum=1, help='tokens of the first context')

    def __post_init__(self):
        _check_limits(self)

    def scale(self, frequencies: jax.Array, base: float) -> jax.Array:
        turns = self.length * frequencies / (2 * math.pi)
        kept = jnp.clip((turns - self.low_turns) / (self.high_turns - self.low_turns), 0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


@configurable('yarn_rotary')
class YarnRotary(RotaryScaling):
    """Divides low frequencies, keeps high ones, and multiplies cosine and sine (Peng et al. 2023, YaRN, §3)."""

    factor: float = field(default=4.0, minimum=1, help='divisor of the low frequencies')
    low_turns: float = field(default=1.0, above=0, help='turns per first context, below which a frequency is divided')
    high_turns: float = field(default=32.0, above=0, help='turns per first context, above which a frequency is kept')
    length: int = field(default=32_768, minimum=1, help='tokens of the first context')
    whole: bool = field(default=True, help='the pairs at both limits are rounded outwards to whole ones')
    attention_factor: float | None = field(
        default=None, above=0, help='factor of cosine and sine; None: 1 + log(factor) / 10'
    )

    def __post_init__(self):
        _check_limits(self)

    @property
    def amplitude(self) -> float:
        return 1 + 0.1 * math.log(self.factor) if self.attention_factor is None else self.attention_factor

    def scale(self, frequencies: jax.Array, base: float) -> jax.Array:
        width = 2 * len(frequencies)
        first, last = (self._pair(turns, width, base) for turns in (self.high_turns, self.low_turns))
        if self.whole:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, width - 1)
        last += 0.001 * (first == last)  # no division by zero
        divided = jnp.clip((jnp.arange(width // 2) - first) / (last - first), 0, 1)
        return frequencies * (1 - divided + divided / self.factor)

    def _pair(self, turns: float, width: int, base: float) -> float:
        """Returns the pair, a real number, that makes `turns` turns per first context (eq. 17, solved for the pair)."""
        return width * math.log(self.length / (2 * math.pi * turns)) / (2 * math.log(base))


def _check_limits(config: Llama3Rotary | YarnRotary) -> None:
    """Raises ConfigError unless the low limit is below the high one."""
    if config.low_turns >= config.high_turns:
        name = config.gin_name
        raise ConfigError(
            f'{name}.low_turns = {config.low_turns}: must be below {name}.high_turns = {config.high_turns}'
        )
