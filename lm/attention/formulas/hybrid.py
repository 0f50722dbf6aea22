"""Hybrid attention (Graef et al. 2024)."""

import math

from lm.attention.formulas.base import Formula, scores
from lm.attention.formulas.tokens import distances


class HybridFormula(Formula, name='hybrid'):
    """Weights exp(scale ⟨q, k⟩) for the `window` newest keys, and a product of polynomials of its parts for
    older keys."""

    def __init__(
        self, heads, kv_heads, size, *, window, degree, parts, coefficients, scale, approximation=None, radius=None
    ):  # fmt: skip
        super().__init__()
        self.window, self.coefficients, self.parts, self.scale = window, coefficients, parts, scale or size**-0.5

    def weights(self, q, k):
        xp, distance, far = self.xp, distances(self.xp, q, k), 1.0
        recent, older = (distance >= 0) & (distance < self.window), distance >= self.window
        width = q.shape[-1] // self.parts
        for at in range(0, q.shape[-1], width):
            s = scores(xp, q[..., at : at + width], k[..., at : at + width]) * self.scale
            far = far * sum(c * s**n for n, c in enumerate(self.coefficients))
        s = scores(xp, q, k) * self.scale
        largest = xp.amax(xp.where(recent, s, -math.inf), -1)[..., None]
        largest = xp.where(older.any(-1)[:, None], xp.clip(largest, 0, None), largest)
        older_weights = xp.where(older, far * xp.exp(-largest), 0.0)
        return xp.where(recent, xp.exp(xp.where(recent, s - largest, 0.0)), older_weights)
