"""Mean weights of random sketches: how much more an unrelated key weighs than in exact polynomial attention.

The square of a noisy inner product carries the variance of the noise. Let g and h be independent Gaussian vectors, and
s = ⟨q, k⟩, N = |q|² |k|². Then ⟨g, q⟩⟨g, k⟩ has the mean s and the mean square N + 2 s² (Isserlis). A node of the tree
(PolySketchFormer, Algorithm 1) is a mean of r products of two such terms, one for each child. Its inner product Z has
the mean s², and

    E Z² = S² + ((N + 2 S)² - S²) / r          E N' = N² + ((N + 2 S)² - N²) / r,  N' = |M_q|² |M_k|²

for children whose mean squares are S and N. Both children have the same ones, and they are independent.
"""

import math

import numpy as np
from numpy.polynomial import Polynomial


def mean_weight_ratio(size: int, r: int, power: int, sketches: int = 1, offset: float = 0.0) -> float:
    """Returns E[⟨ψ(q), ψ(k)⟩²] / E[⟨q, k⟩^2P] for unrelated, layer-normalized q and k and Gaussian sketches.

    Directions are uniform among vectors whose mean is zero. Scores have a standard deviation of about 1 and the mean
    `offset` (`lm.attention.base.score_start`); the unit of scores cancels out.

    Args:
        size: numbers of q and of k, at least 2.
        r: numbers of a sketch.
        power: P, a power of two; the weights have degree 2 P.
        sketches: independent sketches whose inner products are averaged.
        offset: mean of scores, in their standard deviations.
    """
    score = Polynomial([offset, 1.0])
    exact = score ** (2 * power)
    square, norms = score**2, Polynomial([(math.sqrt(size) + offset) ** 2])
    for _ in range(power.bit_length() - 1):
        noisy = (norms + 2 * square) ** 2
        square, norms = square**2 + (noisy - square**2) / r, norms**2 + (noisy - norms**2) / r
    # Inner products of different sketches are independent and have the exact mean.
    mean = exact + (square - exact) / sketches
    return _expect(mean, size) / _expect(exact, size)


def _expect(polynomial: Polynomial, size: int) -> float:
    """Returns the mean of a polynomial of √size cos(angle) between two random directions of size - 1 dimensions."""
    dimensions = size - 1
    moments = np.zeros(len(polynomial.coef))
    moments[0] = 1.0
    for i in range(2, len(moments), 2):  # E[cos^i] = E[cos^(i-2)] (i - 1) / (dimensions + i - 2)
        moments[i] = moments[i - 2] * size * (i - 1) / (dimensions + i - 2)
    return float(np.dot(np.asarray(polynomial.coef, np.float64), moments))
