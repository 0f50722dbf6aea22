"""The shared parts of the formulas: attention whose weights are all in memory at once, in float32.

B batch, L length (queries), M length (keys), H query heads, K key heads, C head size, E features, r sketch numbers.
The queries are of the last L tokens of M.
"""

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from lm.interop.formulas.tokens import SeenKeys, distances

EPSILON = 1e-5
"""Added to the variance in a mechanism's normalizations."""

MECHANISMS = {}
"""Gin name → formula. A subclass of `Mechanism` with a `name` adds itself."""


def gelu(x):
    """Computes GELU by its tanh approximation."""
    return F.gelu(x, approximate='tanh')


def scores(q_BxLxHxE, k_BxMxKxE):
    """Computes inner products [B, H, L, M]; head h reads key head h // (H / K)."""
    k_BxMxHxE = k_BxMxKxE.repeat_interleave(q_BxLxHxE.shape[2] // k_BxMxKxE.shape[2], dim=2)
    return torch.einsum('blhe,bmhe->bhlm', q_BxLxHxE, k_BxMxHxE)


def two_sided(x_BxLxNxE, weight):
    """Computes Hedgehog's features [softmax(W x), softmax(-W x)] + 1e-12; W is [R, E], or [N, R, E] per head."""
    wx = torch.einsum('nre,blne->blnr' if weight.ndim == 3 else 're,blne->blnr', weight, x_BxLxNxE)
    return torch.cat([torch.softmax(wx, dim=-1), torch.softmax(-wx, dim=-1)], dim=-1) + 1e-12


def layer_norm(size, epsilon=EPSILON):
    return nn.LayerNorm(size, eps=epsilon)


def rms_norm(size, epsilon=EPSILON):
    return nn.RMSNorm(size, eps=epsilon)


NORMS = {'layer': layer_norm, 'rms': rms_norm}


class ForgetFactor(nn.Module):
    """a = σ(x W + b), the factor by which a token multiplies all weights before it."""

    def __init__(self, heads):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(heads))

    def log_decay(self, gate_BxLxK):
        """Returns log a."""
        return F.logsigmoid(gate_BxLxK + self.bias)


class StepFactor(nn.Module):
    """a = exp(-A Δ), Δ = softplus(x W + b)."""

    def __init__(self, heads):
        super().__init__()
        self.bias, self.log_rate = (nn.Parameter(torch.zeros(heads)) for _ in range(2))

    def steps(self, gate_BxLxK):
        """Returns Δ."""
        return F.softplus(gate_BxLxK + self.bias)

    def log_decay(self, gate_BxLxK):
        """Returns log a."""
        return -self.log_rate.exp() * self.steps(gate_BxLxK)


class ChannelMap(nn.Module):
    """W y + b for each channel of each key head."""

    def __init__(self, heads, size, rank):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads * size, rank))
        self.bias = nn.Parameter(torch.zeros(heads, size))

    def forward(self, y_BxLxR):
        return F.linear(y_BxLxR, self.weight).unflatten(-1, self.bias.shape) + self.bias


def sum_decays(sums_BxMxK, length, heads):
    """Returns Σ_{j < m ≤ i} log a_m of query i and key j, [B, H, L, M], from sums up to each token; 0 where the key is
    later."""
    sums_BxHxM = sums_BxMxK.repeat_interleave(heads // sums_BxMxK.shape[2], dim=2).transpose(1, 2)
    return (sums_BxHxM[..., -length:, None] - sums_BxHxM[..., None, :]).clamp(max=0)


class Mechanism(nn.Module):
    """One layer's attention. A subclass computes the weights of all pairs before the mask.

    Its constructor takes the numbers of query heads and key heads, the head size, and by name everything that
    `Attention.portable` returns. Its parameters have the names of the mechanism's parameters in JAX.

    Attributes:
        bias: added to the sum of the weights.
        divides: the weights are divided by their sum.
        epsilon: a sum of signed weights within epsilon of 0 moves by 2 epsilon; None: no weight is negative.
        causal: later tokens are hidden.
        gate: the gate, a `ForgetFactor` or `StepFactor`; None: there is none.
        reach: the keys before the newest token that are kept for later queries; None: all.
        folds: keys beyond `reach` are kept as sums over `features`. If False, nothing is kept of them.
    """

    bias, divides, epsilon, causal = 0.0, True, None, True
    reach, folds = None, False

    def __init__(self):
        super().__init__()
        self.gate = None

    def __init_subclass__(cls, *, name='', **options):
        super().__init_subclass__(**options)
        if name:
            MECHANISMS[name] = cls

    def weights(self, q_BxLxHxC, k_BxMxKxC):
        """Returns the weights before the mask, [B, H, L, M]. The queries are of the last L tokens."""
        return scores(*self.features(q_BxLxHxC, k_BxMxKxC))

    def features(self, q_BxLxHxC, k_BxMxKxC) -> Iterable[torch.Tensor]:
        """Returns features of queries and keys whose products are the weights beyond `reach`."""
        raise TypeError(f'{type(self).__name__} has no features')

    def forward(self, q_BxLxHxC, k_BxLxKxC, v_BxLxKxC, tokens, **inputs):
        """Returns [B, L, H, C] of the newest tokens, computed in float32 for any type of the loaded model.

        `inputs` are the further inputs of the mechanism, [B, L, width] each.
        """
        if any(parameter.dtype != torch.float32 for parameter in self.parameters()):
            parameters = {name: parameter.float() for name, parameter in self.named_parameters()}
            return functional_call(self, parameters, (q_BxLxHxC, k_BxLxKxC, v_BxLxKxC, tokens), inputs)
        inputs = {name: x.float() for name, x in inputs.items()}
        mixed = self.mixed(q_BxLxHxC.float(), k_BxLxKxC.float(), v_BxLxKxC.float(), tokens, **inputs)
        return mixed.to(q_BxLxHxC.dtype)

    def make_gate(self, gate, kv_heads):
        """Makes the gate of a mechanism that may have one."""
        self.gate = ForgetFactor(kv_heads) if gate else None

    def log_decay(self, gate_BxLxK):
        """Returns log a of each token, or None."""
        return None if self.gate is None else self.gate.log_decay(gate_BxLxK)

    def decayed(self, q_BxLxHxC, k_BxMxKxC, log_decay_BxHxLxM, seen):
        """Returns the weights before the mask with what later tokens left of them."""
        w_BxHxLxM = self.weights(q_BxLxHxC, k_BxMxKxC)
        return w_BxHxLxM if log_decay_BxHxLxM is None else w_BxHxLxM * log_decay_BxHxLxM.exp()

    def mixed(self, q_BxLxHxC, k_BxLxKxC, v_BxLxKxC, tokens, gate_BxLxK=None):
        """Returns the mixed values, [B, L, H, C]."""
        length, heads = q_BxLxHxC.shape[1:3]
        log_a_BxLxK, sums_BxMxK = self.log_decay(gate_BxLxK), None
        if log_a_BxLxK is not None:
            sums_BxMxK = tokens.join('log_decay', log_a_BxLxK, self.reach).cumsum(1)
        k_BxMxKxC, v_BxMxKxC = tokens.join('k', k_BxLxKxC, self.reach), tokens.join('v', v_BxLxKxC, self.reach)
        seen = SeenKeys(
            tokens.join('mask', tokens.mask_BxL, self.reach), tokens.join('positions', tokens.positions_BxL, self.reach)
        )
        log_decay = None if sums_BxMxK is None else sum_decays(sums_BxMxK, length, heads)
        w_BxHxLxM = self.decayed(q_BxLxHxC, k_BxMxKxC, log_decay, seen)
        w_BxHxLxM = w_BxHxLxM.masked_fill(seen.hidden(distances(q_BxLxHxC, k_BxMxKxC), self.causal), 0.0)
        v_BxMxHxC = v_BxMxKxC.repeat_interleave(heads // v_BxMxKxC.shape[2], dim=2)
        y_BxLxHxC = torch.einsum('bhlm,bmhc->blhc', w_BxHxLxM, v_BxMxHxC)
        total_BxLxHx1 = w_BxHxLxM.sum(-1).transpose(1, 2)[..., None]
        if self.folds and tokens.memory is not None:
            far_BxLxHxV = self.recall(q_BxLxHxC, k_BxMxKxC, v_BxMxKxC, seen, sums_BxMxK, tokens.memory)
            y_BxLxHxC, total_BxLxHx1 = y_BxLxHxC + far_BxLxHxV[..., :-1], total_BxLxHx1 + far_BxLxHxV[..., -1:]
        if not self.divides:
            return y_BxLxHxC
        total_BxLxHx1 = self.bias + total_BxLxHx1
        if self.epsilon is not None:
            total_BxLxHx1 = total_BxLxHx1 + 2 * self.epsilon * (total_BxLxHx1.abs() <= self.epsilon)
        return y_BxLxHxC / total_BxLxHx1

    def recall(self, q_BxLxHxC, k_BxMxKxC, v_BxMxKxC, seen, sums_BxMxK, memory):
        """Returns what the sums over earlier tokens give, and adds the tokens that leave `reach` to them.

        The last number is the sum of the weights, [B, L, H, C + 1].
        """
        length, kv_heads = q_BxLxHxC.shape[1], k_BxMxKxC.shape[2]
        groups, leaving = q_BxLxHxC.shape[2] // kv_heads, max(0, k_BxMxKxC.shape[1] - self.reach)
        q_BxLxHxE, k_BxNxKxE = self.features(q_BxLxHxC, k_BxMxKxC[:, : max(leaving, 1)])
        ones_BxNxKx1 = torch.ones_like(v_BxMxKxC[:, :leaving, :, :1])
        v_BxNxKxV = torch.cat([v_BxMxKxC[:, :leaving], ones_BxNxKx1], dim=-1) * seen.mask_BxM[:, :leaving, None, None]
        if sums_BxMxK is not None:
            q_BxLxHxE = q_BxLxHxE * sums_BxMxK[:, -length:].exp().repeat_interleave(groups, dim=2)[..., None]
        before, found = memory.get('sums'), 0.0
        if before is not None:
            found = torch.einsum('blhe,bhev->blhv', q_BxLxHxE, before.repeat_interleave(groups, dim=1))
        if leaving:
            if sums_BxMxK is not None:
                end = sums_BxMxK[:, leaving - 1]
                k_BxNxKxE = k_BxNxKxE * (end[:, None] - sums_BxMxK[:, :leaving]).exp()[..., None]
                before = None if before is None else before * end.exp()[..., None, None]
            new = torch.einsum('bnke,bnkv->bkev', k_BxNxKxE, v_BxNxKxV)
            memory['sums'] = new if before is None else before + new
        return q_BxLxHxE.new_zeros(*q_BxLxHxE.shape[:3], v_BxNxKxV.shape[-1]) + found


class NormedMechanism(Mechanism):
    """A mechanism with layer normalizations of queries and keys."""

    def make_norms(self, size):
        self.q_norm, self.k_norm = layer_norm(size), layer_norm(size)

    def normalize(self, q, k):
        return self.q_norm(q), self.k_norm(k)


def score_scale(degree, size):
    """Returns a power of two that keeps high powers of scores in float32. With the bias times its power, the weights
    are the same."""
    return 2.0 ** -min(round(math.log2(size)), 112 // degree) if degree > 8 else 1.0
