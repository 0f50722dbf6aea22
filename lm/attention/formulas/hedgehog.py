"""Hedgehog (Zhang et al. 2024)."""

from lm.attention.formulas.base import Formula, FormulaArray, two_sided


class HedgehogFormula(Formula, name='hedgehog'):
    """Weights ⟨φ(q), φ(k)⟩ with φ(x) = [softmax(W x), softmax(-W x)] + 1e-12."""

    reach, folds = 0, True

    def __init__(self, heads, kv_heads, size, *, per_head):
        super().__init__()
        for name, n in (('q_weight', heads), ('k_weight', kv_heads)):
            self.arrays[name] = FormulaArray((n, size, size) if per_head else (size, size))

    def features(self, q, k):
        return two_sided(self.xp, q, self.p['q_weight']), two_sided(self.xp, k, self.p['k_weight'])
