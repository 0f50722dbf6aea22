"""The delta rule: DeltaNet, Gated DeltaNet and Kimi delta attention."""

import torch
from torch import nn
from torch.nn import functional as F

from lm.interop.formulas.base import ChannelMap, Mechanism, StepFactor


class ChannelStepFactor(nn.Module):
    """a = exp(-A softplus(W y + b)), a factor for each channel of the key."""

    def __init__(self, heads, size):
        super().__init__()
        self.logits, self.log_rate = ChannelMap(heads, size, size), nn.Parameter(torch.zeros(heads))

    def log_decay(self, y_BxLxR):
        """Returns log a, [B, L, K, C]."""
        return -self.log_rate.exp()[:, None] * F.softplus(self.logits(y_BxLxR))


class DeltaFormula(Mechanism, name='delta'):
    """S_i = a_i S_{i-1} + β_i k_i (v_i - a_i S_{i-1}ᵀ k_i)ᵀ, token by token; the output is normalized."""

    def __init__(self, heads, kv_heads, size, *, gate, negative, norm_epsilon, value_size):
        super().__init__()
        self.largest = 2.0 if negative else 1.0
        self.gate = None
        if gate:
            self.gate = ChannelStepFactor(kv_heads, size) if gate == 'channel' else StepFactor(kv_heads)
        self.out_norm = nn.RMSNorm(value_size, eps=norm_epsilon)

    def mixed(self, q, k, v, tokens, beta_BxLxK, gate_BxLxN=None):
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        beta_BxLxK, groups = self.largest * tokens.clear(torch.sigmoid(beta_BxLxK)), q.shape[2] // k.shape[2]
        decay = torch.ones_like(beta_BxLxK) if self.gate is None else self.gate.log_decay(gate_BxLxN).exp()
        decay = decay[..., None] if decay.ndim == 3 else decay  # one factor for all channels
        state = q.new_zeros(*k.shape[:1], *k.shape[2:], v.shape[-1])
        if tokens.memory is not None:
            state = tokens.memory.get('state', state)
        parts = []
        for i in range(q.shape[1]):
            state = state * decay[:, i][..., None]
            new = beta_BxLxK[:, i, :, None] * (v[:, i] - torch.einsum('bked,bke->bkd', state, k[:, i]))
            state = state + k[:, i][..., :, None] * new[..., None, :]
            read = torch.einsum('bhed,bhe->bhd', state.repeat_interleave(groups, dim=1), q[:, i])
            parts.append(read * q.shape[-1] ** -0.5)
        if tokens.memory is not None:
            tokens.memory['state'] = state
        return self.out_norm(torch.stack(parts, dim=1))
