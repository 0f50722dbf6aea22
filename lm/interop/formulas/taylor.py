"""Taylor attention (Arora et al. 2024)."""

import torch
from torch import nn

from lm.interop.formulas.base import Mechanism, scores


class TaylorFormula(Mechanism, name='taylor'):
    """Weights 1 + s + s²/2 with s = ⟨W_q q, W_k k⟩ / √r."""

    reach, folds = 0, True

    def __init__(self, heads, kv_heads, size, *, feature_dim, per_head):
        super().__init__()
        self.r = feature_dim or size
        if feature_dim:
            lead = (heads, kv_heads) if per_head else (1, 1)
            self.q_weight, self.k_weight = (nn.Parameter(torch.zeros(n, size, feature_dim)) for n in lead)
        else:
            self.q_weight = self.k_weight = None

    def weights(self, q, k):
        s = scores(self.compressed(q, self.q_weight), self.compressed(k, self.k_weight)) * self.r**-0.5
        return 1 + s + s**2 / 2

    def features(self, q, k):
        pair = self.compressed(q, self.q_weight), self.compressed(k, self.k_weight)
        return (self.expand(x * self.r**-0.25) for x in pair)

    @staticmethod
    def expand(x):
        squares = (x[..., :, None] * x[..., None, :]).flatten(-2) * 2**-0.5
        return torch.cat([torch.ones_like(x[..., :1]), x, squares], dim=-1)

    @staticmethod
    def compressed(x, weight):
        if weight is None:
            return x
        return torch.einsum('blnd,ndr->blnr', x, weight.expand(x.shape[2], -1, -1))
