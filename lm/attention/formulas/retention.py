"""Retention (Sun et al. 2023)."""

from lm.attention.formulas.base import OutputNormedFormula


class RetentionFormula(OutputNormedFormula, name='retention'):
    """Weights γ^(i - j) ⟨q, k⟩ / √C with γ = 1 - 2^(-5 - h) of key head h; the mixture is normalized instead of
    divided."""

    reach, folds = 0, True

    def __init__(self, heads, kv_heads, size, *, norm_epsilon, value_size):
        super().__init__(norm_epsilon, value_size)

    def features(self, q, k):
        return q * q.shape[-1] ** -0.5, k

    def mix(self, q, k, v, tokens):
        return self.normalize_outputs(super().mix(q, k, v, tokens, k[..., 0]))

    def log_decay(self, gate_BxLxK):
        """Returns log γ of each token, whatever it is."""
        head = self.xp.cumsum(self.xp.ones_like(gate_BxLxK), 2) - 1
        return self.xp.log1p(-(2.0 ** (-5 - head)))
