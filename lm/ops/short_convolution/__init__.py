"""Short causal convolutions along the tokens, each channel on its own, then SiLU (Mamba; Mamba-2).

    y_t = silu(Σ_{0 ≤ s < S} w_s x_{t-s})

B batch, L length, N channels, S tokens that a convolution sees, R = S - 1 of them before a token.
"""

from typing import Annotated

import jax

from lm.ops import platform
from lm.ops.arguments import check_shapes
from lm.ops.short_convolution.types import ConvolutionCall

IMPLEMENTATIONS = platform.Implementations('short convolution', __name__, xla='xla', pallas_tpu='tpu')
"""Each module has `short_convolution(call: ConvolutionCall) -> jax.Array`."""


def short_convolution(
    x_BxLxN: jax.Array,
    kernel_SxN: jax.Array,
    before_BxRxN: jax.Array | None = None,
    reach_BxL: jax.Array | None = None,
    *,
    implementation: str | None = None,
) -> Annotated[jax.Array, 'BxLxN']:
    """Computes y, [B, L, N] in the dtype of x; sums are float32.

    Args:
        x_BxLxN: tokens.
        kernel_SxN: w; float32.
        before_BxRxN: the R tokens before x; None: zeros.
        reach_BxL: the number of earlier tokens that a token sees at most, in its document; int32. None: all.
        implementation: one of `IMPLEMENTATIONS`; None picks the platform's.

    Raises:
        OperationError: arrays that do not fit together, an unknown implementation, or one that does not support the
            call.
    """
    call = ConvolutionCall(x_BxLxN, kernel_SxN, before_BxRxN, reach_BxL)
    _check(call)
    return IMPLEMENTATIONS.choose(
        implementation or platform.choose_for_short(x_BxLxN.shape[1]), call
    ).short_convolution(call)


def _check(call: ConvolutionCall) -> None:
    """Raises OperationError for arrays that do not fit together."""
    x_BxLxN, kernel_SxN, before_BxRxN, reach_BxL = call
    check_shapes({'x_BxLxN': x_BxLxN, 'kernel_SxN': kernel_SxN, 'reach_BxL': reach_BxL})
    batch, _, channels = x_BxLxN.shape
    check_shapes({'before_BxRxN': before_BxRxN}, B=batch, R=kernel_SxN.shape[0] - 1, N=channels)


__all__ = ['IMPLEMENTATIONS', 'ConvolutionCall', 'short_convolution']
