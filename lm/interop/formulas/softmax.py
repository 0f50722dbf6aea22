"""Softmax attention."""

import math

import torch
from torch import nn

from lm.interop.formulas.base import Mechanism, scores
from lm.interop.formulas.tokens import distances


class SoftmaxFormula(Mechanism, name='softmax'):
    """Weights exp(scale ⟨q, k⟩) for the `window` newest keys; sinks are one more key of each query."""

    divides = False  # torch.softmax has done it

    def __init__(
        self, heads, kv_heads, size, *, scale, window, sinks=False, score_cap=None, log_base=None, gate=False
    ):  # fmt: skip
        super().__init__()
        self.scale, self.window, self.cap, self.log_base = scale or size**-0.5, window, score_cap, log_base
        self.reach = window - 1 if window else None
        self.sinks = nn.Parameter(torch.zeros(heads)) if sinks else None
        self.make_gate(gate, kv_heads)

    def decayed(self, q, k, log_decay, seen):
        distance = distances(q, k)
        hidden = seen.hidden(distance) | (distance >= (self.window or k.shape[1]))
        s = scores(q, k) * self.scale
        if self.log_base is not None:
            before = seen.positions_BxM[:, None, -q.shape[1] :, None]
            s = s * torch.log(before + self.log_base) / math.log(self.log_base)
        if self.cap is not None:
            s = self.cap * torch.tanh(s / self.cap)
        if log_decay is not None:
            s = s + log_decay
        s = s.masked_fill(hidden, -torch.inf)
        if self.sinks is None:
            return torch.softmax(s, dim=-1)
        sinks = self.sinks[:, None, None].expand(*s.shape[:-1], 1)
        return torch.softmax(torch.cat([s, sinks], dim=-1), dim=-1)[..., :-1]
