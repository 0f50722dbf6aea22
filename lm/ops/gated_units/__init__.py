"""Gated linear units: y = (V ∗ a(G)) W, ∗ entry by entry, where x maps to values V and gates G (Shazeer 2020, eq. 6).

With a norm they are a residual branch: y = x + units(norm(x)).

D width of the model, F width of the units, N = 2F.
"""

import jax

from lm.ops import platform
from lm.ops.arguments import check_shapes
from lm.ops.errors import OperationError
from lm.ops.gated_units.types import ACTIVATIONS, UnitsCall
from lm.ops.norms import Norm

IMPLEMENTATIONS = platform.Implementations('gated units', __name__, reference='reference', xla='xla', pallas_tpu='tpu')
"""Each module has `gated_units(call: UnitsCall) -> jax.Array`."""


def gated_units(
    x_TxD: jax.Array,
    into_DxN: jax.Array,
    out_FxD: jax.Array,
    activation: str = 'silu',
    norm: Norm | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Returns [T, D] in the type of x, where T stands for any number of axes.

    Args:
        x_TxD: tokens.
        into_DxN: the matrix to values, beside the matrix to gates; N = 2F.
        out_FxD: the matrix from units.
        activation: of the gates, a key of `ACTIVATIONS`.
        norm: of a residual branch; None: the result is the output of the units alone.
        implementation: one of `IMPLEMENTATIONS`; None picks the platform's.

    Raises:
        OperationError: arguments that do not fit together, an unknown implementation, or one that does not support the
            call.
    """
    if activation not in ACTIVATIONS:
        raise OperationError(f'activation = {activation!r}: must be one of {", ".join(ACTIVATIONS)}')
    check_shapes({'x_D': x_TxD[(0,) * (x_TxD.ndim - 1)], 'out_FxD': out_FxD})
    check_shapes({'into_DxN': into_DxN}, D=x_TxD.shape[-1], N=2 * out_FxD.shape[0])
    if norm is not None:
        check_shapes({'norm.gain_D': norm.gain_D, 'norm.bias_D': norm.bias_D}, D=x_TxD.shape[-1])
    call = UnitsCall(x_TxD, into_DxN.astype(x_TxD.dtype), out_FxD.astype(x_TxD.dtype), activation, norm)
    tokens = x_TxD.shape[-2] if x_TxD.ndim > 1 else 1
    return IMPLEMENTATIONS.choose(implementation or platform.choose_for_short(tokens), call).gated_units(call)


__all__ = ['ACTIVATIONS', 'IMPLEMENTATIONS', 'Norm', 'UnitsCall', 'gated_units']
