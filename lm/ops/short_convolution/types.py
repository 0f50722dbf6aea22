"""The call of a short convolution, as all implementations take it."""

from typing import NamedTuple, Protocol

import jax


class ConvolutionCall(NamedTuple):
    """The arguments of `lm.ops.short_convolution.short_convolution`."""

    x_BxLxN: jax.Array
    kernel_SxN: jax.Array
    before_BxRxN: jax.Array | None = None
    reach_BxL: jax.Array | None = None


class ConvolutionImplementation(Protocol):
    """A module that computes short convolutions."""

    def short_convolution(self, call: ConvolutionCall) -> jax.Array:
        """Computes a call that `unsupported` does not refuse: y [B, L, N] in the dtype of x."""
        ...
