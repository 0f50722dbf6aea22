"""The shared parts of the formulas: attention whose weights are all in memory at once, in float32.

B batch, L length (queries), M length (keys), H query heads, K key heads, C head size, r numbers of a sketch.
"""

import math

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

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


def distances(length, device):
    """Returns i - j of query i and key j, [L, M]."""
    position = torch.arange(length, device=device)
    return position[:, None] - position


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


def sum_decays(log_decay_BxLxK, heads):
    """Returns Σ_{j < m ≤ i} log a_m of query i and key j, [B, H, L, L]; 0 where the key is later."""
    sums_BxHxL = log_decay_BxLxK.repeat_interleave(heads // log_decay_BxLxK.shape[2], dim=2).cumsum(1).transpose(1, 2)
    return (sums_BxHxL[..., :, None] - sums_BxHxL[..., None, :]).clamp(max=0)


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
    """

    bias, divides, epsilon, causal = 0.0, True, None, True

    def __init__(self):
        super().__init__()
        self.gate = None

    def __init_subclass__(cls, *, name='', **options):
        super().__init_subclass__(**options)
        if name:
            MECHANISMS[name] = cls

    def weights(self, q_BxLxHxC, k_BxMxKxC):
        """Returns the weights before the mask, [B, H, L, M]."""
        raise TypeError(f'{type(self).__name__} gives no weights')

    def forward(self, q_BxLxHxC, k_BxMxKxC, v_BxMxKxC, **inputs):
        """Returns [B, L, H, C] of whole sequences, computed in float32 for any type of the loaded model.

        `inputs` are the further inputs of the mechanism, [B, L, width] each.
        """
        if any(parameter.dtype != torch.float32 for parameter in self.parameters()):
            parameters = {name: parameter.float() for name, parameter in self.named_parameters()}
            return functional_call(self, parameters, (q_BxLxHxC, k_BxMxKxC, v_BxMxKxC), inputs)
        inputs = {name: x.float() for name, x in inputs.items()}
        return self.mixed(q_BxLxHxC.float(), k_BxMxKxC.float(), v_BxMxKxC.float(), **inputs).to(q_BxLxHxC.dtype)

    def make_gate(self, gate, kv_heads):
        """Makes the gate of a mechanism that may have one."""
        self.gate = ForgetFactor(kv_heads) if gate else None

    def decayed(self, q_BxLxHxC, k_BxMxKxC, log_decay_BxHxLxM):
        """Returns the weights before the mask with what later tokens left of them."""
        w_BxHxLxM = self.weights(q_BxLxHxC, k_BxMxKxC)
        return w_BxHxLxM if log_decay_BxHxLxM is None else w_BxHxLxM * log_decay_BxHxLxM.exp()

    def mixed(self, q_BxLxHxC, k_BxMxKxC, v_BxMxKxC, gate_BxLxK=None):
        """Returns the mixed values, [B, L, H, C]."""
        log_decay = None
        if self.gate is not None:
            log_decay = sum_decays(self.gate.log_decay(gate_BxLxK), q_BxLxHxC.shape[2])
        w_BxHxLxM = self.decayed(q_BxLxHxC, k_BxMxKxC, log_decay)
        if self.causal:
            w_BxHxLxM = w_BxHxLxM.masked_fill(distances(w_BxHxLxM.shape[-1], w_BxHxLxM.device) < 0, 0.0)
        if self.divides:
            total = self.bias + w_BxHxLxM.sum(-1, keepdim=True)
            if self.epsilon is not None:
                total = total + 2 * self.epsilon * (total.abs() <= self.epsilon)
            w_BxHxLxM = w_BxHxLxM / total
        v_BxMxHxC = v_BxMxKxC.repeat_interleave(q_BxLxHxC.shape[2] // v_BxMxKxC.shape[2], dim=2)
        return torch.einsum('bhlm,bmhc->blhc', w_BxHxLxM, v_BxMxHxC)


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
