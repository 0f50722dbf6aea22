"""A keyed pseudo-random permutation of {0, …, n-1} in O(1) memory: a Feistel network with cycle walking.

Black and Rogaway, "Ciphers with arbitrary finite domains" (2002): encrypt in the next even power of two and walk the
cycle until the value falls inside the domain. That takes fewer than four walks on average.
"""

import numpy as np

from lm.tasks.draws import mix

ROUNDS = 6


class Permutation:
    """Bijection of {0, …, n-1}; a pure function of (n, seed, stream), the same on every machine."""

    def __init__(self, n: int, seed: int, stream: int = 0):
        if n < 1:
            raise ValueError(f'n = {n}: must be at least 1')
        self.n = n
        self.half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
        self.mask = np.uint64((1 << self.half_bits) - 1)
        keys = np.random.SeedSequence([seed, stream]).generate_state(ROUNDS, np.uint64)
        self.keys = [np.uint64(key) for key in keys]

    def __call__(self, index: np.ndarray) -> np.ndarray:
        """Returns the images of `index`, integers in [0, n), as int64 of the same shape."""
        value = self._encrypt(np.asarray(index, np.uint64))
        while (outside := value >= self.n).any():
            value[outside] = self._encrypt(value[outside])
        return value.astype(np.int64)

    def _encrypt(self, value: np.ndarray) -> np.ndarray:
        shift = np.uint64(self.half_bits)
        left, right = value >> shift, value & self.mask
        for key in self.keys:
            left, right = right, left ^ (mix(right ^ key) & self.mask)
        return (left << shift) | right
