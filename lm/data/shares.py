"""Chooses the source of each example of a mixture, in exact shares, as a pure function of the example's number.

The order repeats after a period in which each source has a whole number of places. Inside a period, the source with the
earliest deadline takes a place. The i-th example of a source with share w may stand from floor(i/w) on. It must stand
before ceil((i + 1)/w). All deadlines can always be met (Baruah, Cohen, Plaxton and Varvel, "Proportionate progress: a
notion of fairness in resource allocation", 1996). Therefore a source has N·w of the first N examples, up to less than
1. It has N·w of any N consecutive examples, up to less than 2.
"""

import fractions
import heapq
import math
from collections.abc import Sequence

import numpy as np

MAX_PERIOD = 2**16
"""Shares that need a longer period are rounded to multiples of its reciprocal."""


class Shares:
    """Shares of sources in proportion to `weights`, positive numbers.

    Attributes:
        counts: places of each source in a period [sources].
        period: examples in a period.
    """

    def __init__(self, weights: Sequence[float]):
        self.counts = np.array(to_whole_numbers(weights), np.int64)
        self.period = int(self.counts.sum())
        self._source = _places(self.counts.tolist())
        self._rank = np.empty(self.period, np.int64)
        for source, count in enumerate(self.counts):
            self._rank[self._source == source] = np.arange(count)

    def __call__(self, example: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source of each example, and the number of the example within that source. Both count from 0."""
        period, place = np.divmod(example, self.period)
        source = self._source[place]
        return source, period * self.counts[source] + self._rank[place]

    def taken(self, examples: int) -> np.ndarray:
        """Returns how many of the first `examples` examples each source has [sources]."""
        periods, rest = divmod(examples, self.period)
        return periods * self.counts + np.bincount(self._source[:rest], minlength=len(self.counts))


def to_whole_numbers(weights: Sequence[float]) -> list[int]:
    """The smallest whole numbers in the proportion of `weights`, which count as the decimals that they are written as;
    where their sum would exceed MAX_PERIOD, the nearest whole numbers with that sum, each at least 1."""
    exact = [fractions.Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    numbers = [int(weight * scale) for weight in exact]
    divisor = math.gcd(*numbers)
    numbers = [number // divisor for number in numbers]
    total = sum(numbers)
    if total <= MAX_PERIOD:
        return numbers
    rounded = [max(1, number * MAX_PERIOD // total) for number in numbers]
    lost = [number * MAX_PERIOD / total - r for number, r in zip(numbers, rounded, strict=True)]
    for i in sorted(range(len(lost)), key=lambda i: -lost[i])[: max(0, MAX_PERIOD - sum(rounded))]:
        rounded[i] += 1
    return rounded


def _places(counts: list[int]) -> np.ndarray:
    """Returns the source of each place of a period, by earliest deadline."""
    period = sum(counts)
    done = [0] * len(counts)
    released: list[tuple[int, int]] = []  # (deadline, source)
    coming = [(0, source) for source in range(len(counts))]  # (first place, source)
    order = np.empty(period, np.int32)
    for place in range(period):
        while coming and coming[0][0] <= place:
            source = heapq.heappop(coming)[1]
            heapq.heappush(released, (-(-(done[source] + 1) * period // counts[source]), source))
        order[place] = source = heapq.heappop(released)[1]
        done[source] += 1
        heapq.heappush(coming, (done[source] * period // counts[source], source))
    return order
