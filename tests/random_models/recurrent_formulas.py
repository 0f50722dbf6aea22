"""The mechanisms that are recurrences over a state, token by token."""

import numpy as np
from formulas import Layer, formula, repeat, rms_norm, softplus
from scipy import special

UNIT_EPSILON = 1e-6
"""Added to the square of the length of queries and keys (`delta`)."""
TEMPERATURE = 16
"""The root of a channel's gate (GLA, §4.4)."""


def recur(layer: Layer, q: np.ndarray, k: np.ndarray, v: np.ndarray, a: np.ndarray) -> np.ndarray:
    """Returns S_iᵀ q_i, S_i = diag(a_i) S_{i-1} + k_i v_iᵀ; documents begin with S = 0. a: [B, L, K, E or 1]."""
    state = np.zeros((*k.shape[:1], *k.shape[2:], v.shape[-1]))
    outputs = []
    for i in range(k.shape[1]):
        kept = np.where((layer.starts[:, i] == i)[:, None, None], 0.0, a[:, i])
        state = kept[..., None] * state + k[:, i, :, :, None] * v[:, i, :, None, :]
        outputs.append(np.einsum('bhev,bhe->bhv', np.repeat(state, layer.groups, axis=1), q[:, i]))
    return np.stack(outputs, axis=1)


@formula('retention')
def attend_retention(layer: Layer) -> np.ndarray:
    """Returns RMSNorm(S_iᵀ q_i / √d), S_i = γ_h S_{i-1} + k_i v_iᵀ, γ_h = 1 - 2^(-5 - h) (Sun et al. 2023, §2)."""
    gamma = 1 - 2.0 ** (-5 - np.arange(layer.k.shape[2]))
    a = np.broadcast_to(gamma[:, None], (*layer.k.shape[:3], 1))
    o = recur(layer, layer.q * layer.q.shape[-1] ** -0.5, layer.k, layer.v, a)
    return rms_norm(o, layer.weights['out_norm'], layer.config.norm_epsilon)


@formula('gated_linear')
def attend_gated_linear(layer: Layer) -> np.ndarray:
    """Returns RMSNorm(S_iᵀ φ(q_i)), S_i = a_i S_{i-1} + φ(k_i) u_iᵀ, with the gates of `lm.attention.recurrent`."""
    config, gate, logits = layer.config, layer.weights['gate'], layer.inputs['gate_BxLxN']
    u, skipped = layer.v, 0.0
    if config.gate == 'sigmoid':
        a = special.expit(logits + gate['bias'])[..., None]
    elif config.gate == 'channel':
        a = special.expit(channel_logits(layer, gate['logits'], logits)) ** (1 / TEMPERATURE)
    else:
        step = softplus(logits + gate['bias'])
        a = np.exp(-np.exp(gate['log_rate']) * step)[..., None]
        u = layer.v * step[..., None]
        skipped = gate['skip'][:, None] * repeat(layer.v, layer.groups)
    q, k = layer.q * layer.q.shape[-1] ** -0.5, layer.k
    if config.degree == 2:
        q, k = ((x[..., :, None] * x[..., None, :]).reshape(*x.shape[:3], -1) for x in (q, k))
    return rms_norm(recur(layer, q, k, u, a) + skipped, layer.weights['out_norm'], config.norm_epsilon)


@formula('delta')
def attend_delta(layer: Layer) -> np.ndarray:
    """Returns RMSNorm(S_iᵀ q_i / √d), S_i = a S_{i-1} + β k (v - a S_{i-1}ᵀ k)ᵀ for q and k of length 1."""
    config, weights = layer.config, layer.weights
    q, k = (x / np.sqrt((x**2).sum(-1, keepdims=True) + UNIT_EPSILON) for x in (layer.q, layer.k))
    q = q * q.shape[-1] ** -0.5
    beta = special.expit(layer.inputs['beta_BxLxK']) * (2 if config.negative else 1)
    a = np.ones((*k.shape[:3], 1))
    if config.gate == 'channel':
        logits = channel_logits(layer, weights['gate']['logits'], layer.inputs['gate_BxLxN'])
        a = np.exp(-np.exp(weights['gate']['log_rate'])[:, None] * softplus(logits))
    elif config.gate:
        steps = softplus(layer.inputs['gate_BxLxN'] + weights['gate']['bias'])
        a = np.exp(-np.exp(weights['gate']['log_rate']) * steps)[..., None]
    state = np.zeros((*k.shape[:1], *k.shape[2:], layer.v.shape[-1]))
    outputs = []
    for i in range(k.shape[1]):
        kept = np.where((layer.starts[:, i] == i)[:, None, None], 0.0, a[:, i])
        state = kept[..., None] * state
        held = np.einsum('bkev,bke->bkv', state, k[:, i])
        state = state + k[:, i, :, :, None] * (beta[:, i, :, None] * (layer.v[:, i] - held))[:, :, None, :]
        outputs.append(np.einsum('bhev,bhe->bhv', np.repeat(state, layer.groups, axis=1), q[:, i]))
    return rms_norm(np.stack(outputs, axis=1), weights['out_norm'], config.norm_epsilon)


def channel_logits(layer: Layer, weights: dict, y: np.ndarray) -> np.ndarray:
    """Returns W y + b of each channel of each key head."""
    return (y @ weights['kernel']).reshape(layer.k.shape) + weights['bias']
