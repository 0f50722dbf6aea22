"""Hybrid attention (Graef et al. 2024)."""

import torch

from lm.interop.formulas.base import Mechanism, scores
from lm.interop.formulas.tokens import distances


class HybridFormula(Mechanism, name='hybrid'):
    """Weights exp(scale ⟨q, k⟩) for the `window` newest keys, and a product of polynomials of its parts for
    older keys."""

    def __init__(
        self, heads, kv_heads, size, *, window, degree, parts, coefficients, scale, approximation=None, radius=None
    ):  # fmt: skip
        super().__init__()
        self.window, self.coefficients, self.parts, self.scale = window, coefficients, parts, scale or size**-0.5

    def weights(self, q, k):
        distance = distances(q, k)
        recent = (distance >= 0) & (distance < self.window)
        far = torch.ones((), device=q.device)
        for a, b in zip(q.chunk(self.parts, dim=-1), k.chunk(self.parts, dim=-1), strict=True):
            s = scores(a, b) * self.scale
            far = far * sum(c * s**n for n, c in enumerate(self.coefficients))
        s = scores(q, k) * self.scale
        largest = s.masked_fill(~recent, -torch.inf).amax(-1, keepdim=True)
        largest = torch.where((distance >= self.window).any(-1, keepdim=True), largest.clamp(min=0.0), largest)
        older = torch.where(distance >= self.window, far * torch.exp(-largest), 0.0)
        return torch.where(recent, torch.exp(torch.where(recent, s - largest, 0.0)), older)
