"""Formulas that references of operations share with formulas of mechanisms (`lm.attention.formulas`).

They are written for any namespace of arrays: `xp` is numpy, jax.numpy or torch. L queries, M keys; B batch, K key
heads, E and D size of keys and values; N sketches of G heads, M vector size, r (R in names) sketch size.
"""

import math

EPSILON = 1e-5
"""Added to the variance in layer normalizations."""


def softmax(xp, x):
    """Computes exp(x) / Σ exp(x) over the last axis."""
    exponentials = xp.exp(x - xp.amax(x, -1)[..., None])
    return exponentials / exponentials.sum(-1)[..., None]


def gelu(xp, x):
    """Computes GELU by its tanh approximation."""
    return x / 2 * (1 + xp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def standardize(xp, x):
    """Returns vectors with mean 0 and variance 1."""
    centred = x - x.mean(-1)[..., None]
    return centred / xp.sqrt((centred**2).mean(-1)[..., None] + EPSILON)


def weigh_by_softmax(xp, scores_LxM, hidden_LxM, cap=None, log_decay_LxM=None, sinks_Lx1=None):
    """Computes exp(s_ij) / (exp(sink) + Σ_j' exp(s_ij')), s = score, or cap · tanh(score / cap), plus the log of the
    factor. All arrays may have leading axes."""
    s_LxM = scores_LxM if cap is None else cap * xp.tanh(scores_LxM / cap)
    s_LxM = xp.where(hidden_LxM, -math.inf, s_LxM if log_decay_LxM is None else s_LxM + log_decay_LxM)
    if sinks_Lx1 is None:
        return softmax(xp, s_LxM)
    sinks_Lx1 = xp.broadcast_to(sinks_Lx1, (*s_LxM.shape[:-1], 1))
    return softmax(xp, xp.concatenate([s_LxM, sinks_Lx1], -1))[..., :-1]


def forget_and_learn(xp, state_BxKxExD, k_BxKxE, v_BxKxD, beta_BxK, decay_BxKxE):
    """Computes a S + β k (v - (a S)ᵀ k)ᵀ, the state of the delta rule after a token; a may have one number for all
    channels."""
    state_BxKxExD = decay_BxKxE[..., None] * state_BxKxExD
    new_BxKxD = beta_BxK[..., None] * (v_BxKxD - xp.einsum('bked,bke->bkd', state_BxKxExD, k_BxKxE))
    return state_BxKxExD + k_BxKxE[..., :, None] * new_BxKxD[..., None, :]


def apply_network(xp, levels, x_NxGxM):
    """Computes a network of a learned sketch.

    It lists its levels: scale and bias of a layer normalization, [N, 1, M], and two maps with gelu in between.
    """
    for scale, bias, wide_NxMxE, narrow_NxExR in levels:
        hidden_NxGxE = gelu(xp, xp.matmul(standardize(xp, x_NxGxM) * scale + bias, wide_NxMxE))
        x_NxGxM = xp.matmul(hidden_NxGxE, narrow_NxExR)
    return x_NxGxM


def climb_tree(nodes, leaves, join):
    """Returns the root of a binary tree; `nodes` lists those above the leaves first, and `join(node, left, right)`."""
    level, remaining = leaves, iter(nodes)
    while len(level) > 1:
        level = [join(next(remaining), left, right) for left, right in zip(level[::2], level[1::2], strict=True)]
    return level[0]


def join_sketches(xp, first_NxGxR, second_NxGxR):
    """Computes a node of a learned sketch from what its networks give: √r tanh(√(1/r) f₁(x) ∗ f₂(y))."""
    r = first_NxGxR.shape[-1]
    return r**0.5 * xp.tanh(r**-0.5 * first_NxGxR * second_NxGxR)
