"""Polynomials that stand for exp on an interval around 0, and their terms for a dot product of vectors.

Approximate attention, §3 (Taylor, Chebyshev, minimax), §5.3 (multinomial terms) and §6 (partial products).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.polynomial import chebyshev


def taylor(degree: int, radius: float) -> np.ndarray:
    """Returns the coefficients 1 / n!: exact at 0, whatever the interval."""
    return np.array([1 / math.factorial(n) for n in range(degree + 1)])


def chebyshev_series(degree: int, radius: float) -> np.ndarray:
    """Returns the Chebyshev series of exp on [-radius, radius], cut after `degree`."""

    def scaled_exp(x: np.ndarray) -> Any:  # NumPy's types expect a number here
        return np.exp(radius * x)

    series = chebyshev.chebinterpolate(scaled_exp, degree + 40)[: degree + 1]
    return chebyshev.cheb2poly(series) / radius ** np.arange(degree + 1)


def minimax(degree: int, radius: float) -> np.ndarray:
    """Returns the polynomial with the least largest error on [-radius, radius], by Remez' exchange algorithm."""
    x = -np.cos(np.pi * np.arange(degree + 2) / (degree + 1))
    grid = -np.cos(np.linspace(0, np.pi, 20_001))
    signs = (-1.0) ** np.arange(degree + 2)
    for _ in range(30):
        # A polynomial whose error is ±level at the nodes x; its largest errors between zeros are the next nodes.
        *c, level = np.linalg.solve(
            np.column_stack([np.vander(x, degree + 1, increasing=True), signs]), np.exp(radius * x)
        )
        error = np.exp(radius * grid) - np.polynomial.polynomial.polyval(grid, c)
        parts = np.split(np.arange(len(grid)), np.flatnonzero(np.diff(np.sign(error))) + 1)
        peaks = [part[np.argmax(np.abs(error[part]))] for part in parts]
        if len(peaks) != degree + 2 or np.abs(error).max() <= abs(level) * (1 + 1e-9):
            break
        x = grid[peaks]
    return np.array(c) / radius ** np.arange(degree + 1)


APPROXIMATIONS: dict[str, Callable[[int, float], np.ndarray]] = {
    'taylor': taylor,
    'chebyshev': chebyshev_series,
    'minimax': minimax,
}
"""Name → function of (degree, radius of the interval) that returns the coefficients a_0 … a_n."""


@functools.cache
def n_terms(size: int, degree: int, parts: int) -> int:
    """Counts a head's sums (eq. 6.4): terms in a product of `parts` polynomials of `degree`, size / parts variables."""
    return math.comb(size // parts + degree, degree) ** parts


@dataclasses.dataclass(frozen=True)
class Monomials:
    """φ with ⟨φ(q), φ(k)⟩ = Π_i P(⟨q_i, k_i⟩) for vectors cut in parts q_i, as a feature map of the linear engine.

    Every monomial of each part, of degree 0 to `degree`, and every product of one monomial of each part: `n_terms`
    features. For queries the parameters are (`weights`,), coefficients and multinomial counts; for keys ().
    """

    degree: int
    parts: int

    def __call__(self, parameters: tuple[jax.Array, ...], x: jax.Array, queries: bool) -> jax.Array:
        """Maps [..., D] to [..., n_terms] in the dtype of x; products are formed in float32."""
        terms = (_monomials(part, self.degree) for part in jnp.split(x.astype(jnp.float32), self.parts, axis=-1))
        features = functools.reduce(lambda a, b: (a[..., :, None] * b[..., None, :]).reshape(*x.shape[:-1], -1), terms)
        if queries:
            features = features * parameters[0]
        return features.astype(x.dtype)

    def weights(self, coefficients: np.ndarray, size: int) -> np.ndarray:
        """Returns [n_terms] float32: a_n n! / Π k! of each monomial Π x^k of degree n, multiplied over the parts."""
        one_part = []
        for n in range(self.degree + 1):
            for indices in itertools.combinations_with_replacement(range(size // self.parts), n):
                repeats = math.prod(math.factorial(len(list(group))) for _, group in itertools.groupby(indices))
                one_part.append(coefficients[n] * math.factorial(n) / repeats)
        return functools.reduce(np.kron, [np.array(one_part)] * self.parts).astype(np.float32)


def _monomials(x: jax.Array, degree: int) -> jax.Array:
    """Lists all monomials of the last axis by degree, each degree in lexicographic order of the sorted indices."""
    size = x.shape[-1]
    result = [jnp.ones_like(x[..., :1])]
    if degree:
        result.append(x)
    # Among monomials of the degree before, the last `tail[i]` have a first index of at least i.
    tail = list(range(size, 0, -1))
    for _ in range(2, degree + 1):
        below = result[-1]
        result.append(jnp.concatenate([x[..., i : i + 1] * below[..., -tail[i] :] for i in range(size)], axis=-1))
        tail = list(itertools.accumulate(reversed(tail)))[::-1]
    return jnp.concatenate(result, axis=-1)
