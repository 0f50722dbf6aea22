"""The soft cap of logits."""

import jax
import jax.numpy as jnp


def capped(logits: jax.Array, cap: float | None) -> jax.Array:
    """Computes cap · tanh(logits / cap), which lies within ±cap and is the identity near 0; None changes nothing."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def capped_slope(logits: jax.Array, cap: float) -> jax.Array:
    """Computes the derivative of `capped` where it has the value `logits`."""
    return 1.0 - (logits / cap) ** 2
