"""Hedgehog (Zhang et al. 2024)."""

import torch
from torch import nn

from lm.interop.formulas.base import Mechanism, scores


class HedgehogFormula(Mechanism, name='hedgehog'):
    """Weights ⟨φ(q), φ(k)⟩ with φ(x) = [softmax(W x), softmax(-W x)] + 1e-12."""

    def __init__(self, heads, kv_heads, size, *, per_head):
        super().__init__()
        lead = ((heads,), (kv_heads,)) if per_head else ((), ())
        self.q_weight, self.k_weight = (nn.Parameter(torch.zeros(*n, size, size)) for n in lead)

    def weights(self, q, k):
        return scores(self.features(q, self.q_weight), self.features(k, self.k_weight))

    @staticmethod
    def features(x, weight):
        wx = torch.einsum('nre,blne->blnr' if weight.ndim == 3 else 're,blne->blnr', weight, x)
        return torch.cat([torch.softmax(wx, dim=-1), torch.softmax(-wx, dim=-1)], dim=-1) + 1e-12
