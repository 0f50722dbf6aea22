"""The shared parts of the formulas: attention whose weights are all in memory at once.

B batch, L length (queries), M length (keys), H query heads, K key heads, C head size, E features, r sketch numbers.
The queries are of the last L tokens of M.
"""

import copy
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from lm.attention.formulas.tokens import distances
from lm.ops.formulas import softmax, standardize

FORMULAS = {}
"""Gin name → formula. A subclass of `Formula` with a `name` adds itself."""


class FormulaArray(NamedTuple):
    """An array of a formula: its shape, the value that it is filled with at first, and whether it is trained."""

    shape: tuple[int, ...]
    first: float = 0.0
    trained: bool = True


def sigmoid(xp, x):
    return 1 / (1 + xp.exp(-x))


def softplus(xp, x):
    """Computes log(1 + exp(x))."""
    return xp.logaddexp(x, xp.zeros_like(x))


def square_features(x):
    """Returns x ⊗ x, whose inner products are squares of the inner products of x."""
    return (x[..., :, None] * x[..., None, :]).reshape(*x.shape[:-1], -1)


def repeat_heads(xp, x_BxLxKxN, heads):
    """Repeats key heads, [B, L, H, …]: head h reads key head h // (H / K)."""
    batch, length, kv_heads, *rest = x_BxLxKxN.shape
    repeated = xp.broadcast_to(x_BxLxKxN[:, :, :, None], (batch, length, kv_heads, heads // kv_heads, *rest))
    return repeated.reshape(batch, length, heads, *rest)


def scores(xp, q_BxLxHxE, k_BxMxKxE):
    """Computes inner products [B, H, L, M]."""
    return xp.einsum('blhe,bmhe->bhlm', q_BxLxHxE, repeat_heads(xp, k_BxMxKxE, q_BxLxHxE.shape[2]))


def mix_values(xp, w_BxHxLxM, v_BxMxKxC):
    """Computes the sums of the values by the weights, [B, L, H, C]."""
    return xp.einsum('bhlm,bmhc->blhc', w_BxHxLxM, repeat_heads(xp, v_BxMxKxC, w_BxHxLxM.shape[1]))


def read_state(xp, q_BxLxHxE, state_BxKxExV):
    """Computes Sᵀ q, [B, L, H, V]."""
    state_BxHxExV = repeat_heads(xp, state_BxKxExV[:, None], q_BxLxHxE.shape[2])[:, 0]
    return xp.einsum('blhe,bhev->blhv', q_BxLxHxE, state_BxHxExV)


def two_sided(xp, x_BxLxNxE, weight):
    """Computes Hedgehog's features [softmax(W x), softmax(-W x)] + 1e-12; W is [R, E], or [N, R, E] per head."""
    wx = xp.einsum('nre,blne->blnr' if weight.ndim == 3 else 're,blne->blnr', weight, x_BxLxNxE)
    return xp.concatenate([softmax(xp, wx), softmax(xp, -wx)], -1) + 1e-12


def sum_decays(xp, sums_BxMxK, length, heads):
    """Returns Σ_{j < m ≤ i} log a_m of query i and key j, [B, H, L, M], from sums up to each token; 0 where the key is
    later."""
    sums_BxHxM = xp.swapaxes(repeat_heads(xp, sums_BxMxK, heads), 1, 2)
    return xp.clip(sums_BxHxM[..., -length:, None] - sums_BxHxM[..., None, :], None, 0)


class Formula:
    """One layer's attention. A subclass computes the weights of all pairs before the mask.

    Its constructor takes the numbers of query heads and key heads, the head size, and by name everything that
    `Attention.portable` returns. `bind` gives it arrays, and then it computes.

    Attributes:
        arrays: name → what is known of the array. An export calls the arrays by the same names.
        xp: numpy, jax.numpy or torch.
        p: name → array of `xp`.
        bias: added to the sum of the weights.
        divides: the weights are divided by their sum.
        epsilon: a sum of signed weights within epsilon of 0 moves by 2 epsilon; None: no weight is negative.
        causal: later tokens are hidden.
        reach: the keys before the newest token that are kept for later queries; None: all.
        folds: keys beyond `reach` are kept as sums over `features`. If False, nothing is kept of them.
    """

    bias, divides, epsilon, causal = 0.0, True, None, True
    reach, folds = None, False
    xp: Any = None
    p: Mapping[str, Any]

    def __init__(self):
        self.arrays: dict[str, FormulaArray] = {}

    def __init_subclass__(cls, *, name='', **options):
        super().__init_subclass__(**options)
        if name:
            FORMULAS[name] = cls

    def bind(self, xp, arrays):
        """Returns the formula with its arrays."""
        bound = copy.copy(self)
        bound.xp, bound.p = xp, arrays
        return bound

    def weights(self, q_BxLxHxC, k_BxMxKxC):
        """Returns the weights before the mask, [B, H, L, M]. The queries are of the last L tokens."""
        return scores(self.xp, *self.features(q_BxLxHxC, k_BxMxKxC))

    def features(self, q_BxLxHxC, k_BxMxKxC) -> Iterable[Any]:
        """Returns features of queries and keys whose products are the weights beyond `reach`."""
        raise TypeError(f'{type(self).__name__} has no features')

    def log_decay(self, gate_BxLxK):
        """Returns log a of each token, a = σ(x W + b), the factor of all weights before it; None: there is no gate."""
        return None if gate_BxLxK is None else -softplus(self.xp, -(gate_BxLxK + self.p['gate.bias']))

    def decayed(self, q_BxLxHxC, k_BxMxKxC, log_decay_BxHxLxM, seen):
        """Returns the weights before the mask with what later tokens left of them."""
        w_BxHxLxM = self.weights(q_BxLxHxC, k_BxMxKxC)
        return w_BxHxLxM if log_decay_BxHxLxM is None else w_BxHxLxM * self.xp.exp(log_decay_BxHxLxM)

    def mix(self, q_BxLxHxC, k_BxLxKxC, v_BxLxKxC, tokens, gate_BxLxK=None):
        """Returns the mixed values of the newest tokens, [B, L, H, C].

        A mechanism's further inputs have the names of `Attention.projections`.
        """
        xp, (length, heads) = self.xp, q_BxLxHxC.shape[1:3]
        log_a_BxLxK, sums_BxMxK = self.log_decay(gate_BxLxK), None
        if log_a_BxLxK is not None:
            sums_BxMxK = xp.cumsum(tokens.join('log_decay', log_a_BxLxK, self.reach), 1)
        k_BxMxKxC, v_BxMxKxC = tokens.join('k', k_BxLxKxC, self.reach), tokens.join('v', v_BxLxKxC, self.reach)
        seen = tokens.list_seen(self.reach)
        log_decay = None if sums_BxMxK is None else sum_decays(xp, sums_BxMxK, length, heads)
        w_BxHxLxM = self.decayed(q_BxLxHxC, k_BxMxKxC, log_decay, seen)
        w_BxHxLxM = xp.where(seen.hidden(distances(xp, q_BxLxHxC, k_BxMxKxC), self.causal), 0.0, w_BxHxLxM)
        y_BxLxHxC = mix_values(xp, w_BxHxLxM, v_BxMxKxC)
        total_BxLxHx1 = xp.swapaxes(w_BxHxLxM.sum(-1), 1, 2)[..., None]
        if self.folds and tokens.memory is not None:
            far_BxLxHxV = self.recall(q_BxLxHxC, k_BxMxKxC, v_BxMxKxC, seen, sums_BxMxK, tokens.memory)
            y_BxLxHxC, total_BxLxHx1 = y_BxLxHxC + far_BxLxHxV[..., :-1], total_BxLxHx1 + far_BxLxHxV[..., -1:]
        if not self.divides:
            return y_BxLxHxC
        total_BxLxHx1 = self.bias + total_BxLxHx1
        if not self.bias:  # padding sees no key
            total_BxLxHx1 = total_BxLxHx1 + (total_BxLxHx1 == 0)
        if self.epsilon is not None:
            total_BxLxHx1 = total_BxLxHx1 + 2 * self.epsilon * (xp.abs(total_BxLxHx1) <= self.epsilon)
        return y_BxLxHxC / total_BxLxHx1

    def recall(self, q_BxLxHxC, k_BxMxKxC, v_BxMxKxC, seen, sums_BxMxK, memory):
        """Returns what the sums over earlier tokens give, and adds the tokens that leave `reach` to them.

        The last number is the sum of the weights, [B, L, H, C + 1].
        """
        xp, (length, heads) = self.xp, q_BxLxHxC.shape[1:3]
        leaving = max(0, k_BxMxKxC.shape[1] - self.reach)
        q_BxLxHxE, k_BxNxKxE = self.features(q_BxLxHxC, k_BxMxKxC[:, : max(leaving, 1)])
        v_BxNxKxV = xp.concatenate([v_BxMxKxC[:, :leaving], xp.ones_like(v_BxMxKxC[:, :leaving, :, :1])], -1)
        v_BxNxKxV = v_BxNxKxV * seen.mask_BxL[:, :leaving, None, None]
        if sums_BxMxK is not None:
            q_BxLxHxE = q_BxLxHxE * repeat_heads(xp, xp.exp(sums_BxMxK[:, -length:]), heads)[..., None]
        before = memory.get('sums')
        if before is None:
            before = xp.zeros_like(k_BxNxKxE[:, 0, :, :, None] * v_BxNxKxV.sum(1)[:, :, None])
        found_BxLxHxV = read_state(xp, q_BxLxHxE, before)
        if leaving:
            if sums_BxMxK is not None:
                end = sums_BxMxK[:, leaving - 1]
                k_BxNxKxE = k_BxNxKxE * xp.exp(end[:, None] - sums_BxMxK[:, :leaving])[..., None]
                before = before * xp.exp(end)[..., None, None]
            memory['sums'] = before + xp.einsum('bnke,bnkv->bkev', k_BxNxKxE, v_BxNxKxV)
        return found_BxLxHxV

    def make_layer_norm(self, name, size):
        """Adds the arrays of `layer_norm`."""
        self.arrays |= {f'{name}.weight': FormulaArray((size,), 1.0), f'{name}.bias': FormulaArray((size,))}

    def layer_norm(self, name, x):
        return standardize(self.xp, x) * self.p[f'{name}.weight'] + self.p[f'{name}.bias']

    def make_gate(self, gate, kv_heads):
        """Adds the array of `log_decay` if there is a gate."""
        if gate:
            self.arrays['gate.bias'] = FormulaArray((kv_heads,))


class NormedFormula(Formula):
    """A formula with layer normalizations of queries and keys, one each or one for both."""

    def make_norms(self, size, tied=False):
        self.k_norm = 'q_norm' if tied else 'k_norm'
        for name in dict.fromkeys(('q_norm', self.k_norm)):
            self.make_layer_norm(name, size)

    def normalize(self, q, k):
        return self.layer_norm('q_norm', q), self.layer_norm(self.k_norm, k)


class OutputNormedFormula(Formula):
    """A formula whose outputs are normalized (RMSNorm) instead of divided by the weights' sum, and which may have
    factors for each channel of the keys."""

    divides = False

    def __init__(self, norm_epsilon, value_size):
        super().__init__()
        self.norm_epsilon, self.arrays['out_norm.weight'] = norm_epsilon, FormulaArray((value_size,), 1.0)

    def normalize_outputs(self, y):
        return y / self.xp.sqrt((y**2).mean(-1)[..., None] + self.norm_epsilon) * self.p['out_norm.weight']

    def make_channel_logits(self, heads, size, rank):
        """Adds the arrays of `channel_logits`."""
        self.arrays['gate.logits.weight'] = FormulaArray((heads * size, rank))
        self.arrays['gate.logits.bias'] = FormulaArray((heads, size))

    def channel_logits(self, y_BxLxR):
        """Returns W y + b for each channel of each key head, [B, L, K, C]."""
        logits, bias = self.xp.einsum('blr,nr->bln', y_BxLxR, self.p['gate.logits.weight']), self.p['gate.logits.bias']
        return logits.reshape(*logits.shape[:2], *bias.shape) + bias

    def steps(self, gate_BxLxK):
        """Returns Δ = softplus(x W + b)."""
        return softplus(self.xp, gate_BxLxK + self.p['gate.bias'])

    def decay_rates(self, steps):
        """Returns log a = -A Δ, with one A per head."""
        rates = self.xp.exp(self.p['gate.log_rate'])
        return -(rates[:, None] if steps.ndim == 4 else rates) * steps


def score_scale(degree, size):
    """Returns a power of two that keeps high powers of scores in float32. With the bias times its power, the weights
    are the same."""
    return 2.0 ** -min(round(math.log2(size)), 112 // degree) if degree > 8 else 1.0
