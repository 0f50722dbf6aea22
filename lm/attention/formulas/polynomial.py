"""Polynomial attention (PolySketchFormer §2.1)."""

from lm.attention.formulas.base import NormedFormula, score_scale, scores


class PolynomialFormula(NormedFormula, name='polynomial'):
    """Weights ⟨q', k'⟩^degree."""

    def __init__(
        self, heads, kv_heads, size, *, degree, denominator_bias, gate=False, offset=None, score_norm='separate'
    ):
        super().__init__()
        self.make_norms(size, tied=score_norm == 'tied')
        self.make_gate(gate, kv_heads)
        self.degree, self.scale = degree, score_scale(degree, size)
        self.bias = denominator_bias * self.scale**degree

    def weights(self, q, k):
        return (self.scale * scores(self.xp, *self.normalize(q, k))) ** self.degree
