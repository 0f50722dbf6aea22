"""How the recall of a student comes back with its tokens of training: a power law, with what it can and cannot say.

    missing(T) = missing(U) · (T / U)^(−exponent)        T tokens, U the geometric mean of the measured ones

`missing` is the share of the teacher's recall that the student lacks. The law is a line in logarithms, fitted by least
squares. It has no limit: a student that stops above the goal can only be seen to do so within the measured points.
"""

import dataclasses
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from lm.text import format_digits, format_si

GOAL = 0.95
"""The share of the teacher's recall that is asked for."""
LEAST_POINTS, LEAST_SPAN = 4, 4
"""A law needs so many points, and its last one so many times the tokens of its first."""
MOST_REACH = 100
"""Beyond so many times the measured tokens, the law says nothing."""
CONFIDENCE = 0.9
"""The probability of an interval, if scatter around the law is normal."""
LEAST_SCATTER = 0.02
"""No share is known better than this, as a share of itself."""


class Estimate(NamedTuple):
    """A number, and its interval of probability `CONFIDENCE`."""

    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class RecallLaw:
    """The law of some points, in logarithms: log missing = mean + slope · (log T − centre).

    Attributes:
        centre: the mean of log T.
        mean: the mean of log missing.
        slope: minus the exponent.
        spread: Σ (log T − centre)².
        scatter: standard deviation of the points around the law.
        n: the number of points.
    """

    centre: float
    mean: float
    slope: float
    spread: float
    scatter: float
    n: int

    @classmethod
    def fit(cls, tokens: np.ndarray, missing: np.ndarray) -> 'RecallLaw':
        """Fits the law to three points or more, all above 0."""
        x, y = np.log(tokens), np.log(missing)
        spread = float(((x - x.mean()) ** 2).sum())
        slope = float((x - x.mean()) @ y) / spread
        left = y - y.mean() - slope * (x - x.mean())
        scatter = max(LEAST_SCATTER, float(np.sqrt((left**2).sum() / (len(x) - 2))))
        return cls(float(x.mean()), float(y.mean()), slope, spread, scatter, len(x))

    @property
    def quantile(self) -> float:
        """Student's quantile of the interval."""
        return float(stdtrit(self.n - 2, (1 + CONFIDENCE) / 2))

    def predict(self, tokens: float) -> Estimate:
        """Returns what is missing after so many tokens, with the interval of one more measurement."""
        u = np.log(tokens) - self.centre
        y = self.mean + self.slope * u
        width = self.quantile * self.scatter * np.sqrt(1 + 1 / self.n + u**2 / self.spread)
        return Estimate(float(np.exp(y)), low=float(np.exp(y - width)), high=float(np.exp(y + width)))

    def invert(self, missing: float) -> Estimate | None:
        """Returns the tokens after which so much is missing, with Fieller's interval; None: the law may as well not
        fall."""
        noise, distance = (self.quantile * self.scatter) ** 2, np.log(missing) - self.mean
        a, b, c = self.slope**2 - noise / self.spread, self.slope * distance, distance**2 - noise / self.n
        if self.slope >= 0 or a <= 0:
            return None
        root = np.sqrt(max(0.0, b**2 - a * c))
        low, high = ((b + sign * root) / a for sign in (-1, 1))
        with np.errstate(over='ignore'):
            value, low, high = (float(np.exp(self.centre + u)) for u in (distance / self.slope, low, high))
        return Estimate(value, low=low, high=high)

    def __str__(self) -> str:
        missing, exponent = format_digits(np.exp(self.mean)), format_digits(-self.slope)
        return f'missing = {missing} · (tokens / {format_si(np.exp(self.centre))})^(−{exponent})'


def flattens(tokens: np.ndarray, missing: np.ndarray) -> bool:
    """Tells whether the fall slows down against a power law, in logarithms, by more than its scatter."""
    x, y = np.log(tokens), np.log(missing)
    powers_nx3 = np.vander(x - x.mean(), 3)  # the square first
    inverse_3x3 = np.linalg.inv(powers_nx3.T @ powers_nx3)
    bend, *_ = found = inverse_3x3 @ powers_nx3.T @ y
    free = len(x) - 3
    scatter = max(LEAST_SCATTER, float(np.sqrt(((y - powers_nx3 @ found) ** 2).sum() / free)))
    return bool(bend > stdtrit(free, (1 + CONFIDENCE) / 2) * scatter * np.sqrt(inverse_3x3[0, 0]))


def forecast(tokens: np.ndarray, missing: np.ndarray) -> list[str]:
    """Returns lines on the tokens after which a student has `GOAL` of its teacher's recall, and on how they were found.

    One line that begins with 'no forecast' tells why the points do not allow one.

    Args:
        tokens: of stage 2 behind each point, ascending [n].
        missing: the share of the teacher's recall that the student lacks at each point [n].
    """
    goal, n = 1 - GOAL, len(tokens)
    reached = int(np.max(np.flatnonzero(missing > goal), initial=-1)) + 1  # a single point may be there by chance
    if reached < n:
        return [f'{GOAL:.0%} of the recall of the teacher is there after {format_si(tokens[reached])} tokens']
    if n < LEAST_POINTS or tokens[-1] < LEAST_SPAN * tokens[0]:
        return [
            f'no forecast: it takes {LEAST_POINTS} saved steps of stage 2 behind the warm-up, and {LEAST_SPAN} times '
            f'the tokens of the first one at the last one; there are {n}'
        ]
    law, before = RecallLaw.fit(tokens, missing), RecallLaw.fit(tokens[:-1], missing[:-1])
    expected = before.predict(float(tokens[-1]))
    test = f'the points before the last predict {expected.value:.3f} for it ({expected.low:.3f} to '
    test += f'{expected.high:.3f}), and it has {missing[-1]:.3f}'
    if not expected.low <= missing[-1] <= expected.high:
        return [f'no forecast: the points follow no power law: {test}']
    if flattens(tokens, missing):
        return ['no forecast: the fall slows down against a power law, so it may end above the goal']
    found = law.invert(goal)
    if found is None:
        return ['no forecast: what is missing does not fall with tokens by more than its scatter']
    if found.value > MOST_REACH * tokens[-1]:
        return [f'no forecast: {law} reaches {goal:.2f} beyond {MOST_REACH} times the measured tokens']
    return [
        f'{GOAL:.0%} of the recall of the teacher after about {format_si(found.value)} tokens of stage 2 '
        f'({CONFIDENCE:.0%} interval: {format_si(found.low)} to {format_si(found.high)})',
        f'how: {law}, by least squares in logarithms through {n} saved steps of {format_si(tokens[0])} to '
        f'{format_si(tokens[-1])} tokens; it assumes that rate and data stay as they are, and that nothing stops the '
        'fall',
        f'test: {test}',
    ]
