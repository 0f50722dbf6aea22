"""LLoPS (Definition 3.3)."""

import torch
from torch import nn
from torch.nn import functional as F

from lm.interop.formulas.base import NormedMechanism


class LlopsFormula(NormedMechanism, name='llops'):
    """Weights ⟨φ_Q(q), φ_K(k)⟩; φ is a sum of products of learned projections, squared if `nonnegative`."""

    reach, folds = 0, True

    def __init__(
        self, heads, kv_heads, size, *, degree, n_features, rank, nonnegative, affine, layer_norm, renormalize,
        denominator_bias, stabilizer, init=None, offset=None,
    ):  # fmt: skip
        super().__init__()
        shape = (degree // 2 if nonnegative else degree, rank, size + affine, n_features)
        self.q_factors, self.k_factors = (nn.Parameter(torch.zeros(shape)) for _ in range(2))
        self.normed, self.nonnegative, self.affine = layer_norm, nonnegative, affine
        self.divides, self.bias = renormalize, denominator_bias
        self.epsilon = None if nonnegative else stabilizer
        if layer_norm:
            self.make_norms(size)

    def features(self, q, k):
        q, k = self.normalize(q, k) if self.normed else (q, k)
        return self.multiply(q, self.q_factors), self.multiply(k, self.k_factors)

    def multiply(self, x, factors):
        x = F.pad(x, (0, 1), value=1.0) if self.affine else x
        products = torch.einsum('blnd,ftdm->ftblnm', x, factors).prod(dim=0).sum(dim=0)
        return products**2 if self.nonnegative else products
