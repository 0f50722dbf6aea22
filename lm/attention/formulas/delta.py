"""The delta rule: DeltaNet, Gated DeltaNet and Kimi delta attention."""

from lm.attention.formulas.base import FormulaArray, OutputNormedFormula, read_state, sigmoid, softplus
from lm.ops.formulas import forget_and_learn


class DeltaFormula(OutputNormedFormula, name='delta'):
    """S_i = a_i S_{i-1} + β_i k_i (v_i - a_i S_{i-1}ᵀ k_i)ᵀ, token by token; the output is normalized.

    a = exp(-A softplus(x W + b)) has one factor for each key head, or for each channel of the key.
    """

    def __init__(self, heads, kv_heads, size, *, gate, negative, norm_epsilon, value_size):
        super().__init__(norm_epsilon, value_size)
        self.gate, self.largest = gate, 2.0 if negative else 1.0
        if gate == 'channel':
            self.make_channel_logits(kv_heads, size, size)
        elif gate:
            self.make_gate(gate, kv_heads)
        if gate:
            self.arrays['gate.log_rate'] = FormulaArray((kv_heads,))

    def decay(self, k, gate_BxLxN):
        """Returns a, [B, L, K, C], or with one number for all channels."""
        if not self.gate:
            return self.xp.ones_like(k[..., :1])
        if self.gate != 'channel':
            return self.xp.exp(self.decay_rates(self.steps(gate_BxLxN)))[..., None]
        return self.xp.exp(self.decay_rates(softplus(self.xp, self.channel_logits(gate_BxLxN))))

    def mix(self, q, k, v, tokens, beta_BxLxK, gate_BxLxN=None):
        xp = self.xp
        q, k = (x / xp.sqrt((x**2).sum(-1)[..., None] + 1e-6) for x in (q, k))
        beta_BxLxK = self.largest * tokens.clear(sigmoid(xp, beta_BxLxK))
        start = xp.zeros_like(k[:, 0, :, :, None] * v[:, 0, :, None])
        state = start if tokens.memory is None else tokens.memory.get('state', start)
        decay, parts = self.decay(k, gate_BxLxN), []
        for i in range(q.shape[1]):
            state = forget_and_learn(xp, state, k[:, i], v[:, i], beta_BxLxK[:, i], decay[:, i])
            parts.append(read_state(xp, q[:, i : i + 1], state) * q.shape[-1] ** -0.5)
        if tokens.memory is not None:
            tokens.memory['state'] = state
        return self.normalize_outputs(xp.concatenate(parts, 1))
