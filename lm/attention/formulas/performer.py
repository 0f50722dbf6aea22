"""Performer (Choromanski et al. 2020, 2021)."""

import math

from lm.attention.formulas.base import Formula, FormulaArray, sigmoid
from lm.ops.formulas import gelu

LIMIT = 35.0
"""The largest exponent of random features that are not rescaled."""

GENERALIZED = {
    'relu': lambda xp, x: xp.clip(x, 0, None),
    'sigmoid': sigmoid,
    'exp': lambda xp, x: xp.exp(xp.clip(x, None, LIMIT)),
    'abs': lambda xp, x: xp.abs(x),
    'gelu': gelu,
    'cos': lambda xp, x: xp.cos(x),
    'tanh': lambda xp, x: xp.tanh(x),
    'identity': lambda xp, x: x,
}

EXPONENTIAL = {'positive': (1, 0), 'hyperbolic': (2, 0), 'trigonometric': (2, None), 'random_phases': (1, None)}
"""Features per row of the projection, or None if their products can be negative."""

SIGNED = {'trigonometric', 'random_phases', 'gelu', 'cos', 'tanh', 'identity'}


class PerformerFormula(Formula, name='performer'):
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
        self.arrays['projection'] = FormulaArray((rows, size), trained=False)
        if features == 'random_phases':
            self.arrays['phases'] = FormulaArray((rows,), trained=False)

    def features(self, q, k):
        return self.map(q, self.divides), self.map(k, False)

    def map(self, x, rescale):
        """Returns φ; a common factor of a token's features is free where `rescale`."""
        xp = self.xp
        wx = math.sqrt(self.scale) * x @ self.p['projection'].T + self.p.get('phases', 0.0)
        half = self.scale / 2 * (x**2).sum(-1)[..., None]
        if self.kind in GENERALIZED:
            return (GENERALIZED[self.kind](xp, wx) + self.kernel_epsilon) / math.sqrt(wx.shape[-1])
        if EXPONENTIAL[self.kind][1] is None:
            outer = 1.0 if rescale else xp.exp(xp.clip(half, None, LIMIT))
            if self.kind == 'random_phases':
                return outer * xp.cos(wx) * math.sqrt(2 / wx.shape[-1])
            return outer * xp.concatenate([xp.sin(wx), xp.cos(wx)], -1) / math.sqrt(wx.shape[-1])
        wx = wx if EXPONENTIAL[self.kind][0] == 1 else xp.concatenate([wx, -wx], -1)
        shift = xp.amax(wx, -1)[..., None] if rescale else half
        exponent = wx - (shift + math.log(wx.shape[-1]) / 2)
        if rescale:
            return xp.exp(exponent)
        return xp.exp(xp.clip(exponent, None, LIMIT)) + self.stabilizer / math.sqrt(wx.shape[-1])
