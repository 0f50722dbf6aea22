"""A power law of loss against compute, fitted by least squares."""

import dataclasses

import numpy as np

from lm.errors import ConfigError
from lm.text import format_digits

EXPONENTS = (1e-3, 3.0)
"""The exponents that a fit looks through. Published curves of language models have 0.05 to 0.5."""
GRID, ROUNDS = 41, 10
"""Exponents per round of the search, and rounds. Each round looks 20 times as closely, around the best one."""


@dataclasses.dataclass(frozen=True)
class PowerLaw:
    """L(C) = limit + factor · (C / unit)^(−exponent), the loss L in nats per token and the compute C in FLOPs.

    The form is Hoffmann et al. (2022), eq. 2, along a path on which model and data grow together.
    """

    limit: float
    factor: float
    exponent: float
    unit: float

    def predict(self, compute: np.ndarray | float) -> np.ndarray:
        """Returns the loss at `compute`."""
        return self.limit + self.factor * (np.asarray(compute) / self.unit) ** -self.exponent

    def invert(self, loss: float) -> float:
        """Returns the compute at which the loss is `loss`, which lies above the limit."""
        return self.unit * ((loss - self.limit) / self.factor) ** (-1 / self.exponent)

    def convert_to_factor(self, nats: float, compute: float) -> float:
        """Returns by how much compute has to grow near `compute` to lower the loss by `nats`."""
        slope = self.exponent * (float(self.predict(compute)) - self.limit)
        return float(np.exp(nats / slope))

    def __str__(self) -> str:
        limit, factor, exponent = map(format_digits, (self.limit, self.factor, self.exponent))
        return f'L(C) = {limit} + {factor} · (C / {self.unit:.0e} FLOPs)^(−{exponent})'.replace('e+', 'e')


def fit_power_law(compute: np.ndarray, loss: np.ndarray) -> PowerLaw:
    """Returns the law with the least squared residuals in nats, and with a limit of at least 0.

    For a given exponent the other two numbers have a closed form. So the search has one dimension, and it begins with a
    grid over all exponents.

    Args:
        compute: FLOPs [n], with three different values or more.
        loss: nats per token [n].

    Raises:
        ConfigError: the loss does not fall with compute.
    """
    unit = 10.0 ** round(float(np.mean(np.log10(compute))))
    x = np.log(compute / unit)
    low, high = np.log(EXPONENTS)
    exponent, limit, factor = 0.0, 0.0, 0.0
    for _ in range(ROUNDS):
        grid = np.linspace(low, high, GRID)
        lines = [_fit_line(np.exp(-np.exp(e) * x), loss) for e in grid]
        i = int(np.argmin([squares for _, _, squares in lines]))
        exponent, (limit, factor, _) = float(np.exp(grid[i])), lines[i]
        low, high = grid[max(i - 1, 0)], grid[min(i + 1, GRID - 1)]
    if not factor > 0:
        raise ConfigError('the losses do not fall with compute; train the sizes on more tokens, or name other runs')
    return PowerLaw(limit, factor, exponent, unit)


def _fit_line(power: np.ndarray, loss: np.ndarray) -> tuple[float, float, float]:
    """Fits loss = limit + factor · power with a limit of at least 0; returns (limit, factor, squared residuals)."""
    centred = power - power.mean()
    factor = float(centred @ loss / (centred @ centred))
    limit = float(loss.mean() - factor * power.mean())
    if limit < 0:
        limit, factor = 0.0, float(power @ loss / (power @ power))
    return limit, factor, float(np.sum((loss - limit - factor * power) ** 2))
