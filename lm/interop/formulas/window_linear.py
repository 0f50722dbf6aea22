"""A window of softmax and linear attention over older keys (Zhang et al. 2024, LoLCATs)."""

import torch
from torch import nn

from lm.interop.formulas.base import Mechanism, scores, two_sided
from lm.interop.formulas.tokens import distances


class WindowLinearFormula(Mechanism, name='window_linear'):
    """Weights γ exp(s - c) for the `window` newest keys, c the largest, f ⟨φ(q), φ(k)⟩ for older ones, φ Hedgehog's."""

    folds = True

    def __init__(self, heads, kv_heads, size, *, window, scale, map=None, mix=None, far_factor=1.0):
        super().__init__()
        self.window, self.scale, self.reach = window, scale or size**-0.5, window - 1
        self.mix_logit = nn.Parameter(torch.zeros(heads))
        self.far_factor, self.log_far_factor = far_factor, None
        if isinstance(far_factor, str):
            self.log_far_factor = nn.Parameter(torch.zeros(heads), requires_grad=False)
        self.q_weight, self.k_weight = (nn.Parameter(torch.zeros(n, size, size)) for n in (heads, kv_heads))

    def features(self, q, k):
        factor = self.far_factor if self.log_far_factor is None else self.log_far_factor.exp()[:, None]
        return factor * two_sided(q, self.q_weight), two_sided(k, self.k_weight)

    def decayed(self, q, k, log_decay, seen):
        distance = distances(q, k)
        inside = ~seen.hidden(distance) & (distance < self.window)
        s = (scores(q, k) * self.scale).masked_fill(~inside, -torch.inf)
        near = torch.sigmoid(self.mix_logit)[:, None, None] * torch.exp(s - s.amax(-1, keepdim=True))
        return torch.where(inside, near, self.weights(q, k))
