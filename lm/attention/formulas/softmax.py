"""Softmax attention."""

import math

from lm.attention.formulas.base import Formula, FormulaArray, scores
from lm.attention.formulas.tokens import distances
from lm.ops.formulas import weigh_by_softmax


class SoftmaxFormula(Formula, name='softmax'):
    """Weights exp(scale ⟨q, k⟩) for the `window` newest keys; sinks are one more key of each query."""

    divides = False  # the softmax has done it

    def __init__(
        self, heads, kv_heads, size, *, scale, window, sinks=False, score_cap=None, log_base=None, gate=False
    ):  # fmt: skip
        super().__init__()
        self.scale, self.window, self.cap, self.log_base = scale or size**-0.5, window, score_cap, log_base
        self.reach = window - 1 if window else None
        if sinks:
            self.arrays['sinks'] = FormulaArray((heads,))
        self.make_gate(gate, kv_heads)

    def decayed(self, q, k, log_decay, seen):
        xp, distance = self.xp, distances(self.xp, q, k)
        hidden = seen.hidden(distance, self.causal) | (distance >= (self.window or k.shape[1]))
        s = scores(xp, q, k) * self.scale
        if self.log_base is not None:
            before = seen.positions_BxL[:, None, -q.shape[1] :, None]
            s = s * xp.log(before + self.log_base) / math.log(self.log_base)
        sinks_Hx1x1 = self.p['sinks'][:, None, None] if 'sinks' in self.p else None
        return weigh_by_softmax(xp, s, hidden, self.cap, log_decay, sinks_Hx1x1)
