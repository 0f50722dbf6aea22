"""Gated units as three products."""

import jax

from lm.ops.dots import product, products
from lm.ops.gated_units.types import ACTIVATIONS, UnitsCall
from lm.ops.norms import normalize
from lm.ops.tpu import tokens_on_lanes


def gated_units(call: UnitsCall) -> jax.Array:
    """Computes any call."""
    normed_TxD = call.x_TxD
    if call.norm is not None:
        with jax.named_scope('norms'):
            normed_TxD = normalize(call.x_TxD, call.norm)
    parts = products(normed_TxD, call.into_DxN, [call.out_FxD.shape[0]])
    values_TxF, gates_TxF = map(tokens_on_lanes, parts)
    y_TxD = product(values_TxF * ACTIVATIONS[call.activation](gates_TxF), call.out_FxD)
    return y_TxD if call.norm is None else call.x_TxD + y_TxD
