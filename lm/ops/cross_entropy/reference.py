"""Cross-entropy as the formula reads: all logits at once. For tests and for reading."""

import jax
import jax.numpy as jnp

from lm.ops.cross_entropy.cap import capped


def cross_entropy(
    x_BxLxD: jax.Array,
    embedding_VxD: jax.Array,
    bias_V: jax.Array | None,
    targets_BxL: jax.Array,
    *,
    cap: float | None = None,
    normalizer: bool = False,
    chunk: int | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """log Σ_v exp(logit_v) - logit_target. Arguments as in `lm.ops.cross_entropy`."""
    embedding_VxD = embedding_VxD.astype(x_BxLxD.dtype)
    logits_BxLxV = jnp.einsum('bld,vd->blv', x_BxLxD, embedding_VxD, preferred_element_type=jnp.float32)
    if bias_V is not None:
        logits_BxLxV += bias_V.astype(jnp.float32)
    logits_BxLxV = capped(logits_BxLxV, cap)
    picked_BxL = jnp.take_along_axis(logits_BxLxV, targets_BxL[..., None], -1)[..., 0]
    total_BxL = jax.nn.logsumexp(logits_BxLxV, axis=-1)
    nats_BxL = total_BxL - picked_BxL
    return (nats_BxL, total_BxL) if normalizer else nats_BxL


def weighted_cross_entropy(
    x_BxLxD: jax.Array,
    embedding_VxD: jax.Array,
    bias_V: jax.Array | None,
    targets_BxL: jax.Array,
    weights_BxL: jax.Array,
    *,
    cap: float | None = None,
    z_loss: float = 0.0,
    chunk: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Σ weight · (nats + z_loss · log-normalizer²). Arguments as in `lm.ops.cross_entropy`."""
    nats_BxL, total_BxL = cross_entropy(x_BxLxD, embedding_VxD, bias_V, targets_BxL, cap=cap, normalizer=True)
    losses_BxL = nats_BxL + z_loss * total_BxL**2
    total_1x1 = jnp.sum(weights_BxL * losses_BxL, where=weights_BxL != 0.0, keepdims=True)
    return total_1x1, jax.lax.stop_gradient(nats_BxL)


def unsupported(*args, **options) -> None:
    """Everything is supported."""
