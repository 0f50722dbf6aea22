"""A window of softmax and linear attention over older keys (Zhang et al. 2024, LoLCATs)."""

import torch
from torch import nn

from lm.interop.formulas.base import Mechanism, distances, scores


class WindowLinearFormula(Mechanism, name='window_linear'):
    """Weights γ exp(s - c) for the `window` newest keys, with their largest score c, and ⟨φ(q), φ(k)⟩ for older
    ones; φ is Hedgehog's."""

    def __init__(self, heads, kv_heads, size, *, window, scale, mix=None, map=None):
        super().__init__()
        self.window, self.scale, self.mix_logit = window, scale or size**-0.5, nn.Parameter(torch.zeros(heads))
        self.q_weight, self.k_weight = (nn.Parameter(torch.zeros(n, size, size)) for n in (heads, kv_heads))

    def weights(self, q, k):
        distance = distances(k.shape[1], k.device)
        recent = (distance >= 0) & (distance < self.window)
        s = scores(q, k) * self.scale
        largest = s.masked_fill(~recent, -torch.inf).amax(-1, keepdim=True)
        near = torch.sigmoid(self.mix_logit)[:, None, None] * torch.exp(torch.where(recent, s - largest, 0.0))
        far = scores(self.two_sided(q, self.q_weight), self.two_sided(k, self.k_weight))
        return torch.where(recent, near, torch.where(distance >= self.window, far, 0.0))

    @staticmethod
    def two_sided(x, weight):
        wx = torch.einsum('nre,blne->blnr', weight, x)
        return torch.cat([torch.softmax(wx, dim=-1), torch.softmax(-wx, dim=-1)], dim=-1) + 1e-12
