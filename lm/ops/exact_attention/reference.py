"""Exact attention written as the formulas read: all n × n weights at once. For tests and for reading."""

import jax
import jax.numpy as jnp
from jax import lax

from lm.ops.decay import pairwise
from lm.ops.exact_attention.types import ExactCall, PolynomialCall, SoftmaxCall
from lm.ops.formulas import weigh_by_softmax
from lm.ops.powers import quotient


def softmax_attention(call: SoftmaxCall) -> jax.Array:
    """Weighs by `weigh_by_softmax` with the score scale ⟨q, k⟩."""
    scores_BxKxGxLxM, sinks_KxGx1x1 = _scores(call) * call.scale, None
    if call.sinks_H is not None:
        sinks_KxGx1x1 = call.sinks_H.reshape(*scores_BxKxGxLxM.shape[1:3], 1, 1)
    arguments = ~_visible(call), call.score_cap, _log_factors(call), sinks_KxGx1x1
    return _mix(weigh_by_softmax(jnp, scores_BxKxGxLxM, *arguments), call)


def polynomial_attention(call: PolynomialCall) -> jax.Array:
    """Weights (scale ⟨q_i, k_j⟩)^p / (denominator_bias + Σ_j' (scale ⟨q_i, k_j'⟩)^p): PolySketchFormer §2.1."""
    scores_BxKxGxLxM = _scores(call) * call.scale
    visible_LxM = _visible(call)
    factors_BxKxGxLxM = jnp.exp(_log_factors(call))
    weights_BxKxGxLxM = jnp.where(visible_LxM, scores_BxKxGxLxM**call.degree * factors_BxKxGxLxM, 0.0)
    weights_BxKxGxLxM = quotient(weights_BxKxGxLxM, call.denominator_bias + weights_BxKxGxLxM.sum(-1, keepdims=True))
    return _mix(weights_BxKxGxLxM, call)


def _scores(call: ExactCall) -> jax.Array:
    q_BxLxHxD, k_BxMxKxD = call.q_BxLxHxD, call.k_BxMxKxD
    q_BxLxKxGxD = q_BxLxHxD.reshape(*q_BxLxHxD.shape[:2], k_BxMxKxD.shape[2], -1, q_BxLxHxD.shape[3])
    return jnp.einsum('blkgd,bmkd->bkglm', q_BxLxKxGxD, k_BxMxKxD, preferred_element_type=jnp.float32)


def _log_factors(call: ExactCall) -> jax.Array:
    if call.log_decay_BxMxK is None:
        return jnp.float32(0.0)
    between_BxKxMxM = pairwise(call.log_decay_BxMxK.astype(jnp.float32).swapaxes(1, 2))
    return lax.dynamic_slice_in_dim(between_BxKxMxM, call.q_offset, call.q_BxLxHxD.shape[1], axis=2)[:, :, None]


def _visible(call: ExactCall) -> jax.Array:
    """[L, M], or [B, 1, 1, L, M] where it differs between the rows of the batch."""
    query_Lx1 = call.q_offset + jnp.arange(call.q_BxLxHxD.shape[1])[:, None]
    key_M = jnp.arange(call.k_BxMxKxD.shape[1])
    visible_LxM = (key_M >= call.k_start) & jnp.ones_like(query_Lx1, bool)
    if call.causal:
        visible_LxM &= key_M <= query_Lx1
    if call.window is not None:
        visible_LxM &= key_M > query_Lx1 - call.window
    if call.starts_BxL is not None:
        return visible_LxM & (key_M >= call.starts_BxL[:, None, None, :, None])
    return visible_LxM


def _mix(weights_BxKxGxLxM: jax.Array, call: ExactCall) -> jax.Array:
    q_BxLxHxD, v_BxMxKxD = call.q_BxLxHxD, call.v_BxMxKxD
    o_BxLxKxGxD = jnp.einsum('bkglm,bmkd->blkgd', weights_BxKxGxLxM, v_BxMxKxD, preferred_element_type=jnp.float32)
    return o_BxLxKxGxD.reshape(*q_BxLxHxD.shape[:3], v_BxMxKxD.shape[-1]).astype(q_BxLxHxD.dtype)
