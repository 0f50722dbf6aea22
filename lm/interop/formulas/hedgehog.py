"""Hedgehog (Zhang et al. 2024)."""

import torch
from torch import nn

from lm.interop.formulas.base import Mechanism, two_sided


class HedgehogFormula(Mechanism, name='hedgehog'):
    """Weights ⟨φ(q), φ(k)⟩ with φ(x) = [softmax(W x), softmax(-W x)] + 1e-12."""

    reach, folds = 0, True

    def __init__(self, heads, kv_heads, size, *, per_head):
        super().__init__()
        lead = ((heads,), (kv_heads,)) if per_head else ((), ())
        self.q_weight, self.k_weight = (nn.Parameter(torch.zeros(*n, size, size)) for n in lead)

    def features(self, q, k):
        return two_sided(q, self.q_weight), two_sided(k, self.k_weight)
