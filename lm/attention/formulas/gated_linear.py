"""Gated linear attention (GLA, Mamba-2, gated power attention)."""

from lm.attention.formulas.base import (
    FormulaArray,
    OutputNormedFormula,
    mix_values,
    read_state,
    repeat_heads,
    scores,
    softplus,
)


class GatedLinearFormula(OutputNormedFormula, name='gated_linear'):
    """Weights (⟨q, k⟩ / √C)^degree times the gates in between; the mixture is normalized instead of divided.

    'ssd': the steps of the gate also multiply the values, and part of the values is added to the output. 'channel':
    a = σ(W y + b)^(1/16), a factor for each channel of the key.
    """

    def __init__(self, heads, kv_heads, size, *, gate, degree, norm_epsilon, value_size):
        super().__init__(norm_epsilon, value_size)
        self.reach, self.folds = (0, True) if degree == 1 else (None, False)  # a power has too many features
        self.gate, self.degree = gate, degree
        if gate == 'channel':
            self.make_channel_logits(kv_heads, size, 16)
        else:
            self.make_gate(gate, kv_heads)
        if gate == 'ssd':
            self.arrays |= {'gate.log_rate': FormulaArray((kv_heads,)), 'gate.skip': FormulaArray((heads,), 1.0)}

    def weights(self, q, k):
        return scores(self.xp, *self.features(q, k)) ** self.degree

    def features(self, q, k):
        return q * q.shape[-1] ** -0.5, k

    def log_decay(self, gate_BxLxK):
        return self.decay_rates(self.steps(gate_BxLxK)) if self.gate == 'ssd' else super().log_decay(gate_BxLxK)

    def mix(self, q, k, v, tokens, gate_BxLxN):
        if self.gate == 'channel':
            return self.normalize_outputs(self.mix_by_channel(q, k, v, tokens, gate_BxLxN))
        if self.gate != 'ssd':
            return self.normalize_outputs(super().mix(q, k, v, tokens, gate_BxLxN))
        y = super().mix(q, k, v * self.steps(gate_BxLxN)[..., None], tokens, gate_BxLxN)
        return self.normalize_outputs(y + self.p['gate.skip'][:, None] * repeat_heads(self.xp, v, q.shape[2]))

    def mix_by_channel(self, q, k, v, tokens, gate_BxLxR):
        xp = self.xp
        sums, v = xp.cumsum(-softplus(xp, -self.channel_logits(gate_BxLxR)) / 16, 1), tokens.clear(v)
        q = q * q.shape[-1] ** -0.5
        k_BxLxHxC, sums_BxLxHxC = (repeat_heads(xp, x, q.shape[2]) for x in (k, sums))
        fading_BxLxMxHxC = xp.exp(xp.clip(sums_BxLxHxC[:, :, None] - sums_BxLxHxC[:, None], None, 0))
        w_BxHxLxM = xp.einsum('blhc,bmhc,blmhc->bhlm', q, k_BxLxHxC, fading_BxLxMxHxC)
        y = mix_values(xp, xp.tril(w_BxHxLxM), v)
        if tokens.memory is None:
            return y
        end = sums[:, -1:]
        new_BxKxCxV = xp.einsum('blkc,blkv->bkcv', k * xp.exp(end - sums), v)
        before = tokens.memory.get('sums', xp.zeros_like(new_BxKxCxV))
        tokens.memory['sums'] = before * xp.exp(end[:, 0])[..., None] + new_BxKxCxV
        return y + read_state(xp, q * xp.exp(sums_BxLxHxC), before)
