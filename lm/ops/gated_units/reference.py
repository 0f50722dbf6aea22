"""Gated units as their formula reads, in float32."""

import jax
import jax.numpy as jnp

from lm.ops.gated_units.types import ACTIVATIONS, UnitsCall


def gated_units(call: UnitsCall) -> jax.Array:
    """Computes any call."""
    x_TxD, into_DxN, out_FxD = (array.astype(jnp.float32) for array in call[:3])
    normed_TxD, norm = x_TxD, call.norm
    if norm is not None:
        centred_TxD = x_TxD - x_TxD.mean(-1, keepdims=True) if norm.centred else x_TxD
        spread_Tx1 = jnp.sqrt((centred_TxD**2).mean(-1, keepdims=True) + norm.epsilon)
        normed_TxD = centred_TxD / spread_Tx1 * norm.gain_D
        if norm.bias_D is not None:
            normed_TxD += norm.bias_D
    values_TxF, gates_TxF = jnp.split(jnp.matmul(normed_TxD, into_DxN, precision='highest'), 2, axis=-1)
    y_TxD = jnp.matmul(values_TxF * ACTIVATIONS[call.activation](gates_TxF), out_FxD, precision='highest')
    return (y_TxD if norm is None else x_TxD + y_TxD).astype(call.x_TxD.dtype)
