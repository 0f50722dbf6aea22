"""A window of softmax and linear attention over older keys (Zhang et al. 2024, LoLCATs)."""

import math

from lm.attention.formulas.base import Formula, FormulaArray, scores, sigmoid, two_sided
from lm.attention.formulas.tokens import distances


class WindowLinearFormula(Formula, name='window_linear'):
    """Weights γ exp(s - c) for the `window` newest keys, c the largest, f ⟨φ(q), φ(k)⟩ for older ones, φ Hedgehog's."""

    folds = True
    relative = True
    """c is subtracted: the features have a unit of their own."""

    def __init__(self, heads, kv_heads, size, *, window, scale, map=None, mix=None, far_factor=1.0):
        super().__init__()
        self.window, self.scale, self.reach, self.far_factor = window, scale or size**-0.5, window - 1, far_factor
        self.arrays['mix_logit'] = FormulaArray((heads,))
        if isinstance(far_factor, str):
            self.arrays['log_far_factor'] = FormulaArray((heads,), trained=False)
        for name, n in (('q_weight', heads), ('k_weight', kv_heads)):
            self.arrays[name] = FormulaArray((n, size, size))

    def features(self, q, k):
        learned = 'log_far_factor' in self.p
        factor = self.xp.exp(self.p['log_far_factor'])[:, None] if learned else self.far_factor
        return factor * two_sided(self.xp, q, self.p['q_weight']), two_sided(self.xp, k, self.p['k_weight'])

    def decayed(self, q, k, log_decay, seen):
        xp, distance = self.xp, distances(self.xp, q, k)
        inside = ~seen.hidden(distance) & (distance < self.window)
        s = xp.where(inside, scores(xp, q, k) * self.scale, -math.inf)
        s = s - xp.amax(s, -1)[..., None] if self.relative else s
        near = sigmoid(xp, self.p['mix_logit'])[:, None, None] * xp.exp(s)
        return xp.where(inside, near, self.weights(q, k))
