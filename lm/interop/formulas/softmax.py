"""Softmax attention."""

import torch

from lm.interop.formulas.base import Mechanism, distances, scores


class SoftmaxFormula(Mechanism, name='softmax'):
    """Weights exp(scale ⟨q, k⟩) for the `window` newest keys."""

    divides = False  # torch.softmax has done it

    def __init__(self, heads, kv_heads, size, *, scale, window, gate=False):
        super().__init__()
        self.scale, self.window = scale or size**-0.5, window

    def weights(self, q, k):
        distance = distances(k.shape[1], k.device)
        hidden = (distance < 0) | (distance >= (self.window or k.shape[1]))
        return torch.softmax((scores(q, k) * self.scale).masked_fill(hidden, -torch.inf), dim=-1)
