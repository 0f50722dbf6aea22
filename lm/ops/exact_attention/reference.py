"""Exact attention written as the formulas read: all n × n weights at once. For tests and for reading."""

import jax
import jax.numpy as jnp
from jax import lax

from lm.ops.decay import pairwise
from lm.ops.powers import quotient


def softmax_attention(
    q_BxLxHxD: jax.Array,
    k_BxMxKxD: jax.Array,
    v_BxMxKxD: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    causal: bool = True,
    q_offset: jax.Array | int = 0,
    k_start: jax.Array | int = 0,
    starts: jax.Array | None = None,
    log_decay_BxMxK: jax.Array | None = None,
    block: int | None = None,
) -> jax.Array:
    """Weights exp(scale ⟨q_i, k_j⟩) / Σ_j' exp(scale ⟨q_i, k_j'⟩). Arguments as in `lm.ops.exact_attention`."""
    scores_BxKxGxLxM = _scores(q_BxLxHxD, k_BxMxKxD) * scale + _log_factors(q_BxLxHxD, q_offset, log_decay_BxMxK)
    visible_LxM = _visible(q_BxLxHxD, k_BxMxKxD, window, causal, q_offset, k_start, starts)
    weights_BxKxGxLxM = jax.nn.softmax(jnp.where(visible_LxM, scores_BxKxGxLxM, -jnp.inf), axis=-1)
    return _mix(weights_BxKxGxLxM, q_BxLxHxD, v_BxMxKxD)


def polynomial_attention(
    q_BxLxHxD: jax.Array,
    k_BxMxKxD: jax.Array,
    v_BxMxKxD: jax.Array,
    *,
    degree: int,
    denominator_bias: float = 1.0,
    scale: float = 1.0,
    causal: bool = True,
    q_offset: jax.Array | int = 0,
    k_start: jax.Array | int = 0,
    starts: jax.Array | None = None,
    log_decay_BxMxK: jax.Array | None = None,
    block: int | None = None,
) -> jax.Array:
    """Weights (scale ⟨q_i, k_j⟩)^p / (denominator_bias + Σ_j' (scale ⟨q_i, k_j'⟩)^p): PolySketchFormer §2.1."""
    scores_BxKxGxLxM = _scores(q_BxLxHxD, k_BxMxKxD) * scale
    visible_LxM = _visible(q_BxLxHxD, k_BxMxKxD, None, causal, q_offset, k_start, starts)
    factors_BxKxGxLxM = jnp.exp(_log_factors(q_BxLxHxD, q_offset, log_decay_BxMxK))
    weights_BxKxGxLxM = jnp.where(visible_LxM, scores_BxKxGxLxM**degree * factors_BxKxGxLxM, 0.0)
    weights_BxKxGxLxM = quotient(weights_BxKxGxLxM, denominator_bias + weights_BxKxGxLxM.sum(-1, keepdims=True))
    return _mix(weights_BxKxGxLxM, q_BxLxHxD, v_BxMxKxD)


def unsupported(*args, **options) -> None:
    """Everything is supported."""


def _scores(q_BxLxHxD: jax.Array, k_BxMxKxD: jax.Array) -> jax.Array:
    q_BxLxKxGxD = q_BxLxHxD.reshape(*q_BxLxHxD.shape[:2], k_BxMxKxD.shape[2], -1, q_BxLxHxD.shape[3])
    return jnp.einsum('blkgd,bmkd->bkglm', q_BxLxKxGxD, k_BxMxKxD, preferred_element_type=jnp.float32)


def _log_factors(q_BxLxHxD, q_offset, log_decay_BxMxK) -> jax.Array:
    if log_decay_BxMxK is None:
        return jnp.float32(0.0)
    of_keys_BxKxMxM = pairwise(log_decay_BxMxK.astype(jnp.float32).swapaxes(1, 2))
    return lax.dynamic_slice_in_dim(of_keys_BxKxMxM, q_offset, q_BxLxHxD.shape[1], axis=2)[:, :, None]


def _visible(q_BxLxHxD, k_BxMxKxD, window, causal, q_offset, k_start, starts) -> jax.Array:
    """[L, M], or [B, 1, 1, L, M] where it differs between the rows of the batch."""
    query_Lx1 = q_offset + jnp.arange(q_BxLxHxD.shape[1])[:, None]
    key_M = jnp.arange(k_BxMxKxD.shape[1])
    visible_LxM = (key_M >= k_start) & jnp.ones_like(query_Lx1, bool)
    if causal:
        visible_LxM &= key_M <= query_Lx1
    if window is not None:
        visible_LxM &= key_M > query_Lx1 - window
    if starts is not None:
        return visible_LxM & (key_M >= starts[:, None, None, :, None])
    return visible_LxM


def _mix(weights_BxKxGxLxM: jax.Array, q_BxLxHxD: jax.Array, v_BxMxKxD: jax.Array) -> jax.Array:
    o_BxLxKxGxD = jnp.einsum('bkglm,bmkd->blkgd', weights_BxKxGxLxM, v_BxMxKxD, preferred_element_type=jnp.float32)
    return o_BxLxKxGxD.reshape(*q_BxLxHxD.shape[:3], v_BxMxKxD.shape[-1]).astype(q_BxLxHxD.dtype)
