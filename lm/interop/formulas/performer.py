"""Performer (Choromanski et al. 2020, 2021)."""

import math

import torch
from torch import nn

from lm.interop.formulas.base import Mechanism, gelu

LIMIT = 35.0
"""The largest exponent of random features that are not rescaled."""

GENERALIZED = {
    'relu': torch.relu,
    'sigmoid': torch.sigmoid,
    'exp': lambda x: torch.exp(x.clamp(max=LIMIT)),
    'abs': torch.abs,
    'gelu': gelu,
    'cos': torch.cos,
    'tanh': torch.tanh,
    'identity': lambda x: x,
}

EXPONENTIAL = {'positive': (1, 0), 'hyperbolic': (2, 0), 'trigonometric': (2, None), 'random_phases': (1, None)}
"""Features per row of the projection, or None if their products can be negative."""

SIGNED = {'trigonometric', 'random_phases', 'gelu', 'cos', 'tanh', 'identity'}


class PerformerFormula(Mechanism, name='performer'):
    """Weights ⟨φ(q), φ(k)⟩ with random features φ."""

    reach, folds = 0, True

    def __init__(
        self, heads, kv_heads, size, *, features, n_features, renormalize, causal, scale, stabilizer, kernel_epsilon,
        projection=None, redraw_every=None, block=None,
    ):  # fmt: skip
        super().__init__()
        self.kind, self.divides, self.causal = features, renormalize, causal
        self.scale, self.stabilizer, self.kernel_epsilon = scale or size**-0.5, stabilizer, kernel_epsilon
        self.epsilon = stabilizer if features in SIGNED else None
        rows = n_features // EXPONENTIAL.get(features, (1, 0))[0]
        self.projection = nn.Parameter(torch.zeros(rows, size), requires_grad=False)
        self.phases = nn.Parameter(torch.zeros(rows), requires_grad=False) if features == 'random_phases' else None

    def features(self, q, k):
        return self.map(q, self.divides), self.map(k, False)

    def map(self, x, rescale):
        wx = math.sqrt(self.scale) * x @ self.projection.T
        wx = wx if self.phases is None else wx + self.phases
        half = self.scale / 2 * (x**2).sum(-1, keepdim=True)
        if self.kind in GENERALIZED:
            return (GENERALIZED[self.kind](wx) + self.kernel_epsilon) / math.sqrt(wx.shape[-1])
        if EXPONENTIAL[self.kind][1] is None:
            outer = 1.0 if rescale else torch.exp(half.clamp(max=LIMIT))
            if self.phases is not None:
                return outer * wx.cos() * math.sqrt(2 / wx.shape[-1])
            return outer * torch.cat([wx.sin(), wx.cos()], dim=-1) / math.sqrt(wx.shape[-1])
        wx = wx if EXPONENTIAL[self.kind][0] == 1 else torch.cat([wx, -wx], dim=-1)
        shift = wx.amax(-1, keepdim=True) if rescale else half
        exponent = wx - (shift + math.log(wx.shape[-1]) / 2)
        if rescale:
            return torch.exp(exponent)
        return torch.exp(exponent.clamp(max=LIMIT)) + self.stabilizer / math.sqrt(wx.shape[-1])
