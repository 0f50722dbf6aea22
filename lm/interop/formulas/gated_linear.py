"""Gated linear attention (GLA, Mamba-2, gated power attention)."""

import torch
from torch import nn
from torch.nn import functional as F

from lm.interop.formulas.base import ChannelMap, ForgetFactor, Mechanism, StepFactor, scores


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

    def __init__(self, heads, kv_heads, size, *, gate, degree, norm_epsilon, value_size):
        super().__init__()
        self.reach, self.folds = (0, True) if degree == 1 else (None, False)  # a power has too many features
        self.degree, self.out_norm = degree, nn.RMSNorm(value_size, eps=norm_epsilon)
        if gate == 'channel':
            self.gate = ChannelForgetFactor(kv_heads, size)
        else:
            self.gate = SkippedStepFactor(heads, kv_heads) if gate == 'ssd' else ForgetFactor(kv_heads)

    def weights(self, q, k):
        return scores(*self.features(q, k)) ** self.degree

    def features(self, q, k):
        return q * q.shape[-1] ** -0.5, k

    def mixed(self, q, k, v, tokens, gate_BxLxN):
        if isinstance(self.gate, ChannelForgetFactor):
            return self.out_norm(self.mixed_by_channel(q, k, v, tokens, gate_BxLxN))
        if not isinstance(self.gate, SkippedStepFactor):
            return self.out_norm(super().mixed(q, k, v, tokens, gate_BxLxN))
        y = super().mixed(q, k, v * self.gate.steps(gate_BxLxN)[..., None], tokens, gate_BxLxN)
        v_BxLxHxC = v.repeat_interleave(q.shape[2] // v.shape[2], dim=2)
        return self.out_norm(y + self.gate.skip[:, None] * v_BxLxHxC)

    def mixed_by_channel(self, q, k, v, tokens, gate_BxLxR):
        sums, v = self.gate.log_decay(gate_BxLxR).cumsum(1), tokens.clear(v)
        k, v, sums = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v, sums))
        q = q * q.shape[-1] ** -0.5
        fading_BxLxMxHxC = (sums[:, :, None] - sums[:, None]).clamp(max=0).exp()
        w_BxHxLxM = torch.einsum('blhc,bmhc,blmhc->bhlm', q, k, fading_BxLxMxHxC)
        y = torch.einsum('bhlm,bmhc->blhc', w_BxHxLxM.tril(), v)
        if tokens.memory is None:
            return y
        before = tokens.memory.get('sums', y.new_zeros(*y.shape[:1], *k.shape[2:], v.shape[-1]))
        end = sums[:, -1:]
        new = torch.einsum('blhc,blhv->bhcv', k * (end - sums).exp(), v)
        tokens.memory['sums'] = before * end[:, 0, :, :, None].exp() + new
        return y + torch.einsum('blhc,bhcv->blhv', q * sums.exp(), before)
