"""The call of a short convolution, as all implementations take it."""

from typing import NamedTuple

import jax


class ConvolutionCall(NamedTuple):
    """The arguments of `lm.ops.short_convolution.short_convolution`."""

    x_BxLxN: jax.Array
    kernel_SxN: jax.Array
    before_BxRxN: jax.Array | None = None
    reach_BxL: jax.Array | None = None
