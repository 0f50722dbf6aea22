"""Retention (Sun et al. 2023)."""

import torch
from torch import nn

from lm.interop.formulas.base import EPSILON, Mechanism, distances, scores


class RetentionFormula(Mechanism, name='retention'):
    """Weights γ^(i - j) ⟨q, k⟩ / √C; the mixture is normalized instead of divided."""

    divides = False

    def __init__(self, heads, kv_heads, size, *, value_size):
        super().__init__()
        self.rates = [1 - 2.0 ** (-5 - h // (heads // kv_heads)) for h in range(heads)]
        self.out_norm = nn.RMSNorm(value_size, eps=EPSILON)

    def weights(self, q, k):
        distance = distances(k.shape[1], k.device).clamp(min=0)
        rates = torch.tensor(self.rates, device=k.device)[:, None, None]
        return scores(q, k) * q.shape[-1] ** -0.5 * rates**distance

    def mixed(self, q, k, v):
        return self.out_norm(super().mixed(q, k, v))
