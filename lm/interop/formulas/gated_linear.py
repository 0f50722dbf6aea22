"""Gated linear attention (GLA, Mamba-2, gated power attention)."""

import torch
from torch import nn
from torch.nn import functional as F

from lm.interop.formulas.base import EPSILON, ChannelMap, ForgetFactor, Mechanism, StepFactor, scores


class SkippedStepFactor(StepFactor):
    """A gate whose steps also multiply the values; part of the values is added to the output."""

    def __init__(self, heads, kv_heads):
        super().__init__(kv_heads)
        self.skip = nn.Parameter(torch.ones(heads))


class ChannelForgetFactor(nn.Module):
    """a = σ(W y + b)^(1/16), a factor for each channel of the key."""

    def __init__(self, heads, size):
        super().__init__()
        self.logits = ChannelMap(heads, size, 16)

    def log_decay(self, y_BxLxR):
        """Returns log a, [B, L, K, C]."""
        return F.logsigmoid(self.logits(y_BxLxR)) / 16


class GatedLinearFormula(Mechanism, name='gated_linear'):
    """Weights (⟨q, k⟩ / √C)^degree times the gates in between; the mixture is normalized instead of divided."""

    divides = False

    def __init__(self, heads, kv_heads, size, *, gate, degree, value_size):
        super().__init__()
        self.degree, self.out_norm = degree, nn.RMSNorm(value_size, eps=EPSILON)
        if gate == 'channel':
            self.gate = ChannelForgetFactor(kv_heads, size)
        else:
            self.gate = SkippedStepFactor(heads, kv_heads) if gate == 'ssd' else ForgetFactor(kv_heads)

    def weights(self, q, k):
        return (scores(q, k) * q.shape[-1] ** -0.5) ** self.degree

    def mixed(self, q, k, v, gate_BxLxN):
        if isinstance(self.gate, ChannelForgetFactor):
            return self.out_norm(self.mixed_by_channel(q, k, v, gate_BxLxN))
        if not isinstance(self.gate, SkippedStepFactor):
            return self.out_norm(super().mixed(q, k, v, gate_BxLxN))
        y = super().mixed(q, k, v * self.gate.steps(gate_BxLxN)[..., None], gate_BxLxN)
        v_BxLxHxC = v.repeat_interleave(q.shape[2] // v.shape[2], dim=2)
        return self.out_norm(y + self.gate.skip[:, None] * v_BxLxHxC)

    def mixed_by_channel(self, q, k, v, gate_BxLxR):
        sums = self.gate.log_decay(gate_BxLxR).cumsum(1)
        k, v, sums = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v, sums))
        fading_BxLxMxHxC = (sums[:, :, None] - sums[:, None]).clamp(max=0).exp()
        w_BxHxLxM = torch.einsum('blhc,bmhc,blmhc->bhlm', q * q.shape[-1] ** -0.5, k, fading_BxLxMxHxC)
        return torch.einsum('bhlm,bmhc->blhc', w_BxHxLxM.tril(), v)
