"""LLoPS (Definition 3.3)."""

from lm.attention.formulas.base import FormulaArray, NormedFormula


class LlopsFormula(NormedFormula, name='llops'):
    """Weights ⟨φ_Q(q), φ_K(k)⟩; φ is a sum of products of learned projections, squared if `nonnegative`."""

    reach, folds = 0, True

    def __init__(
        self, heads, kv_heads, size, *, degree, n_features, rank, nonnegative, affine, layer_norm, renormalize,
        denominator_bias, stabilizer, init=None, offset=None,
    ):  # fmt: skip
        super().__init__()
        shape = (degree // 2 if nonnegative else degree, rank, size + affine, n_features)
        self.arrays |= {'q_factors': FormulaArray(shape), 'k_factors': FormulaArray(shape)}
        self.normed, self.nonnegative, self.affine = layer_norm, nonnegative, affine
        self.divides, self.bias = renormalize, denominator_bias
        self.epsilon = None if nonnegative else stabilizer
        if layer_norm:
            self.make_norms(size)

    def features(self, q, k):
        q, k = self.normalize(q, k) if self.normed else (q, k)
        return self.multiply(q, self.p['q_factors']), self.multiply(k, self.p['k_factors'])

    def multiply(self, x, factors):
        x = self.xp.concatenate([x, self.xp.ones_like(x[..., :1])], -1) if self.affine else x
        products = self.xp.einsum('blnd,ftdm->ftblnm', x, factors).prod(0).sum(0)
        return products**2 if self.nonnegative else products
