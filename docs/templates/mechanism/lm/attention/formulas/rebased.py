"""ReBased (Aksenov et al. 2024)."""

from lm.attention.formulas.base import Formula, FormulaArray, scores


# Tests compare the module with this formula, and `lm export --format huggingface` ships it for PyTorch: `self.xp` is
# numpy or torch. `self.arrays` names the arrays as an export does: a norm's gain and bias are `weight` and `bias`.
class RebasedFormula(Formula, name='rebased'):
    """⟨γ ∗ norm(W q) + β, γ' ∗ norm(W' k) + β'⟩²."""

    def __init__(self, heads, kv_heads, size, *, feature_dim, denominator_bias):
        super().__init__()
        self.bias = denominator_bias
        for name in ('q', 'k'):
            self.arrays[f'{name}_weight'] = FormulaArray((size, feature_dim))
            self.make_layer_norm(f'{name}_norm', feature_dim)

    def weights(self, q, k):
        q, k = (self.layer_norm(f'{n}_norm', x @ self.p[f'{n}_weight']) for n, x in (('q', q), ('k', k)))
        return scores(self.xp, q, k) ** 2
