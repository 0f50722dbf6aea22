"""Retention (Sun et al. 2023)."""

import math

import torch
from torch import nn

from lm.interop.formulas.base import Mechanism


class RetentionFormula(Mechanism, name='retention'):
    """Weights γ^(i - j) ⟨q, k⟩ / √C; the mixture is normalized instead of divided."""

    divides, reach, folds = False, 0, True

    def __init__(self, heads, kv_heads, size, *, norm_epsilon, value_size):
        super().__init__()
        self.log_rates = [math.log1p(-(2.0 ** (-5 - h))) for h in range(kv_heads)]
        self.out_norm = nn.RMSNorm(value_size, eps=norm_epsilon)

    def features(self, q, k):
        return q * q.shape[-1] ** -0.5, k

    def mixed(self, q, k, v, tokens):
        return self.out_norm(super().mixed(q, k, v, tokens, k[..., 0]))

    def log_decay(self, gate_BxLxK):
        """Returns log γ of each token, whatever it is."""
        return torch.tensor(self.log_rates, device=gate_BxLxK.device).expand_as(gate_BxLxK)
