"""The call of gated linear units, as all implementations take it, and the activations of gates.

D width of the model, F width of the units.
"""

from typing import NamedTuple

import jax

from lm.ops.norms import Norm

ACTIVATIONS = {'gelu': jax.nn.gelu, 'silu': jax.nn.silu}
"""GELU by its tanh approximation."""


class UnitsCall(NamedTuple):
    """The arguments of `lm.ops.gated_units.gated_units`; x may have any number of axes before its last."""

    x_TxD: jax.Array
    into_DxN: jax.Array
    out_FxD: jax.Array
    activation: str
    norm: Norm | None = None
