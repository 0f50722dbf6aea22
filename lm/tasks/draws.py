"""Random numbers that are pure functions of a key."""

import copy
from collections.abc import Iterator

import numpy as np


def mix(x: np.ndarray) -> np.ndarray:
    """Applies the finaliser of SplitMix64 (Steele et al. 2014): every input bit changes every output bit."""
    with np.errstate(over='ignore'):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Draws:
    """Random numbers of N examples: pure functions of (seed, split, index) and of the calls made before.

    Each example has a SplitMix64 generator of its own (Steele et al. 2014), so its numbers depend on no other example.
    """

    def __init__(self, seed: int, split: str, index_N: np.ndarray):
        key = np.random.SeedSequence([seed, *split.encode()]).generate_state(1, np.uint64)
        self.n = len(index_N)
        self._state_N = mix(key + mix(index_N.astype(np.uint64)))
        self._drawn = 0

    def uniform(self, count: int) -> np.ndarray:
        """Returns [N, count] numbers in [0, 1)."""
        counter = np.arange(self._drawn + 1, self._drawn + count + 1, dtype=np.uint64)
        self._drawn += count
        bits = mix(self._state_N[:, None] + counter * np.uint64(0x9E3779B97F4A7C15))
        return (bits >> np.uint64(11)) * 2.0**-53

    def each(self) -> Iterator['Draws']:
        """Yields the draws of each example alone, for tasks that make one example at a time."""
        for i in range(self.n):
            one = copy.copy(self)
            one.n, one._state_N = 1, self._state_N[i : i + 1]
            yield one

    def integers(self, high: int, count: int) -> np.ndarray:
        """Returns [N, count] integers in {0, …, high-1}."""
        return (self.uniform(count) * high).astype(np.int64)

    def distinct(self, high: int, count: int, weights: np.ndarray | None = None) -> np.ndarray:
        """Returns [N, count] different integers in {0, …, high-1} in the order drawn, with probabilities ∝ `weights`
        [high].

        The smallest of exponential variables with these rates are a draw without replacement.
        """
        waiting = -np.log1p(-self.uniform(high)) / (1.0 if weights is None else weights)
        return np.argsort(waiting, axis=1)[:, :count]
