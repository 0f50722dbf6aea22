"""ReBased (Aksenov et al. 2024)."""

import torch
from torch import nn

from lm.interop.formulas.base import Mechanism, layer_norm, scores


# `lm export --format huggingface` writes this file for PyTorch. The names of parameters are those of the module in JAX.
class RebasedFormula(Mechanism, name='rebased'):
    """⟨γ ∗ norm(W q) + β, γ' ∗ norm(W' k) + β'⟩²."""

    def __init__(self, heads, kv_heads, size, *, feature_dim, denominator_bias):
        super().__init__()
        self.q_weight, self.k_weight = (nn.Parameter(torch.zeros(size, feature_dim)) for _ in range(2))
        self.q_norm, self.k_norm = layer_norm(feature_dim), layer_norm(feature_dim)
        self.bias = denominator_bias

    def weights(self, q, k):
        return scores(self.q_norm(q @ self.q_weight), self.k_norm(k @ self.k_weight)) ** 2
