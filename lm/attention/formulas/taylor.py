"""Taylor attention (Arora et al. 2024)."""

from lm.attention.formulas.base import Formula, FormulaArray, scores, square_features


class TaylorFormula(Formula, name='taylor'):
    """Weights 1 + s + s²/2 with s = ⟨W_q q, W_k k⟩ / √r."""

    reach, folds = 0, True

    def __init__(self, heads, kv_heads, size, *, feature_dim, per_head):
        super().__init__()
        self.r = feature_dim or size
        for name, n in (('q_weight', heads), ('k_weight', kv_heads)) if feature_dim else ():
            self.arrays[name] = FormulaArray((n if per_head else 1, size, feature_dim))

    def weights(self, q, k):
        s = scores(self.xp, self.compress(q, 'q_weight'), self.compress(k, 'k_weight')) * self.r**-0.5
        return 1 + s + s**2 / 2

    def features(self, q, k):
        return (self.expand(self.compress(x, name) * self.r**-0.25) for x, name in ((q, 'q_weight'), (k, 'k_weight')))

    def expand(self, x):
        return self.xp.concatenate([self.xp.ones_like(x[..., :1]), x, square_features(x) * 2**-0.5], -1)

    def compress(self, x, name):
        if name not in self.p:
            return x
        weight = self.p[name]
        return self.xp.einsum('blnd,ndr->blnr', x, self.xp.broadcast_to(weight, (x.shape[2], *weight.shape[1:])))
