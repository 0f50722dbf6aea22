"""The distributions of a search, as a sweep file writes them.

Each stands where a grid has a list:

      log_uniform(1e-4, 1e-2)               a number whose logarithm is uniform
      uniform(0.0, 0.2)                     a number
      integers(2, 8), integers(2, 8, 2)     a whole number, in steps of 1 or of the third number
      choice(@softmax(), @polynomial())     one of the values, whatever they are
"""

import ast
import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lm.config.text import format_value
from lm.errors import ConfigError

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Drawn = float | int | str
"""Optuna's form of a value: a number, or a text for a choice."""


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Numbers between two limits.

    Attributes:
        step: between whole numbers.
        log: uniform in the logarithm.
    """

    low: float
    high: float
    kind: type[int] | type[float] = float
    step: int = 1
    log: bool = False

    def to_optuna(self) -> 'BaseDistribution':
        """Returns the distribution of Optuna."""
        from optuna.distributions import FloatDistribution, IntDistribution

        if self.kind is int:
            return IntDistribution(int(self.low), int(self.high), step=self.step)
        return FloatDistribution(self.low, self.high, log=self.log)

    def to_gin(self, drawn: Drawn) -> object:
        """Returns a drawn value as gin reads it."""
        return self.kind(drawn)

    def find(self, text: str) -> Drawn | None:
        """Returns Optuna's form of the value that config.gin writes as `text`; None where it is none of these."""
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return self.kind(value) if is_number and self.low <= value <= self.high else None

    def list_probes(self) -> list[object]:
        """Returns values, in gin's form, that may decide which other parameters have an effect."""
        return [self.to_gin(self.low)]


@dataclasses.dataclass(frozen=True)
class Choice:
    """One of several values; its methods do what the methods of `Numbers` do.

    Attributes:
        values: as gin reads them.
        written: as config.gin writes them, which may differ from the sweep file.
    """

    values: tuple[object, ...]
    written: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(map(format_value, self.values))

    def to_optuna(self) -> 'BaseDistribution':
        from optuna.distributions import CategoricalDistribution

        return CategoricalDistribution(self.names)

    def to_gin(self, drawn: Drawn) -> object:
        return self.values[self.names.index(str(drawn))]

    def find(self, text: str) -> Drawn | None:
        written = self.written or self.names
        return self.names[written.index(text)] if text in written else None

    def list_probes(self) -> list[object]:
        return list(self.values)


Distribution = Numbers | Choice


def _make_log_uniform(low: float, high: float) -> Numbers:
    if low <= 0:
        raise ConfigError('its limits must be above 0')
    return Numbers(low, high, log=True)


def _make_integers(low: int, high: int, step: int = 1) -> Numbers:
    if not all(isinstance(number, int) for number in (low, high, step)) or step < 1:
        raise ConfigError('its limits and its step must be whole numbers')
    return Numbers(low, high, int, step)


def _make_choice(*values: object) -> Choice:
    if len(values) < 2 or len(set(map(format_value, values))) < len(values):
        raise ConfigError('it needs two different values or more')
    return Choice(values)


KINDS: dict[str, Callable[..., Distribution]] = {
    'log_uniform': _make_log_uniform,
    'uniform': Numbers,
    'integers': _make_integers,
    'choice': _make_choice,
}
"""Name → what makes the distribution of the values in its brackets."""
ARGUMENTS = r"""\((?:[^#'"\r\n]|'[^'\r\n]*'|"[^"\r\n]*")*\)"""
"""Brackets with anything but a comment: a # in quotes begins none."""
WRITTEN = re.compile(
    rf'^(\s*[\w./]+\s*=\s*)((?:{"|".join(KINDS)}){ARGUMENTS})[ \t]*(?:#[^\r\n]*)?(?=\r?$)', re.MULTILINE
)


def quote_distributions(text: str) -> str:
    """Returns the text of a gin file with distributions in quotes, since gin has no such values."""
    return WRITTEN.sub(lambda found: f'{found[1]}{found[2]!r}', text)


def split_distribution(value: object) -> tuple[str, str] | None:
    """Returns name and arguments of a distribution that `quote_distributions` has quoted; None for other values."""
    found = re.fullmatch(rf'({"|".join(KINDS)})\((.*)\)', value) if isinstance(value, str) else None
    return (found[1], found[2]) if found else None


def make_distribution(name: str, values: Sequence[Any]) -> Distribution:
    """Returns a distribution by its name. Raises ConfigError without the place, for values that it cannot take."""
    is_range = KINDS[name] is not _make_choice
    if is_range and not all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        raise ConfigError('its limits must be numbers')
    if is_range and not (2 <= len(values) <= (3 if KINDS[name] is _make_integers else 2) and values[0] < values[1]):
        raise ConfigError('give the lower limit and a higher one')
    return KINDS[name](*values)
