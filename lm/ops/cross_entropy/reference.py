"""Cross-entropy as the formula reads: all logits at once. For tests and for reading."""

import jax
import jax.numpy as jnp

from lm.ops.cross_entropy.cap import capped
from lm.ops.cross_entropy.types import CrossEntropyCall, WeightedCall


def cross_entropy(call: CrossEntropyCall) -> tuple[jax.Array, jax.Array | None]:
    """Computes log Σ_v exp(logit_v) - logit_target."""
    nats_BxL, total_BxL = _nats_and_normalizers(call)
    return nats_BxL, total_BxL if call.normalizer else None


def weighted_cross_entropy(call: WeightedCall) -> tuple[jax.Array, jax.Array]:
    """Computes Σ weight · (nats + z_loss · log-normalizer²)."""
    nats_BxL, total_BxL = _nats_and_normalizers(call)
    losses_BxL = nats_BxL + call.z_loss * total_BxL**2
    total_1x1 = jnp.sum(call.weights_BxL * losses_BxL, where=call.weights_BxL != 0.0, keepdims=True)
    return total_1x1, jax.lax.stop_gradient(nats_BxL)


def _nats_and_normalizers(call: CrossEntropyCall) -> tuple[jax.Array, jax.Array]:
    embedding_VxD = call.embedding_VxD.astype(call.x_BxLxD.dtype)
    logits_BxLxV = jnp.einsum('bld,vd->blv', call.x_BxLxD, embedding_VxD, preferred_element_type=jnp.float32)
    if call.bias_V is not None:
        logits_BxLxV += call.bias_V.astype(jnp.float32)
    logits_BxLxV = capped(logits_BxLxV, call.cap)
    picked_BxL = jnp.take_along_axis(logits_BxLxV, call.targets_BxL[..., None], -1)[..., 0]
    total_BxL = jax.nn.logsumexp(logits_BxLxV, axis=-1)
    return total_BxL - picked_BxL, total_BxL
