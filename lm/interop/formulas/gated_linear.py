"""Gated linear attention (Mamba-2, gated power attention)."""

import torch
from torch import nn

from lm.interop.formulas.base import EPSILON, ForgetGate, Mechanism, StepGate, scores


class GatedLinearFormula(Mechanism, name='gated_linear'):
    """Weights (⟨q, k⟩ / √C)^degree times the gates in between; the mixture is normalized instead of divided."""

    divides = False

    def __init__(self, heads, kv_heads, size, *, gate, degree):
        super().__init__()
        self.degree, self.gate = degree, ForgetGate(kv_heads) if gate == 'sigmoid' else StepGate(kv_heads)
        self.gate.skip = nn.Parameter(torch.ones(heads)) if gate == 'ssd' else None
        self.out_norm = nn.RMSNorm(size, eps=EPSILON)

    def weights(self, q, k):
        return (scores(q, k) * q.shape[-1] ** -0.5) ** self.degree

    def mixed(self, q, k, v, gate_BxLxK):
        if self.gate.skip is None:
            return self.out_norm(super().mixed(q, k, v, gate_BxLxK))
        y = super().mixed(q, k, v * self.gate.steps(gate_BxLxK)[..., None], gate_BxLxK)
        v_BxLxHxC = v.repeat_interleave(q.shape[2] // v.shape[2], dim=2)
        return self.out_norm(y + self.gate.skip[:, None] * v_BxLxHxC)
