"""The formula of a layer of experts, expert by expert."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def apply_experts_one_by_one(
    x_TxD: jax.Array,
    chosen_TxN: jax.Array,
    weights_TxN: jax.Array,
    into_ExDxG: jax.Array,
    out_ExFxD: jax.Array,
    activate: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Computes the same as its formula reads: every expert maps every token, with weight 0 where it was not chosen."""
    y_TxD = jnp.zeros(x_TxD.shape, jnp.float32)
    for expert, (into_DxG, out_FxD) in enumerate(zip(into_ExDxG, out_ExFxD, strict=True)):
        weight_T = jnp.where(chosen_TxN == expert, weights_TxN, 0.0).sum(axis=1)
        y_TxD += weight_T[:, None] * (activate(x_TxD @ into_DxG) @ out_FxD).astype(jnp.float32)
    return y_TxD.astype(x_TxD.dtype)
