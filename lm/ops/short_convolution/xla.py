"""Short convolutions as their formula reads: a sum of shifted arrays."""

import jax
import jax.numpy as jnp

from lm.ops.short_convolution.types import ConvolutionCall


def short_convolution(call: ConvolutionCall) -> jax.Array:
    """Computes any call."""
    x_BxLxN, kernel_SxN, before_BxRxN, reach_BxL = call
    (batch, length, channels), width = x_BxLxN.shape, kernel_SxN.shape[0]
    if before_BxRxN is None:
        before_BxRxN = jnp.zeros((batch, width - 1, channels))
    all_BxMxN = jnp.concatenate([before_BxRxN.astype(x_BxLxN.dtype), x_BxLxN], axis=1)

    def term(s: int) -> jax.Array:
        x = all_BxMxN[:, width - 1 - s : width - 1 - s + length].astype(jnp.float32)
        if reach_BxL is not None and s:
            x = jnp.where((reach_BxL >= s)[..., None], x, 0.0)
        return kernel_SxN[s] * x

    return jax.nn.silu(sum(map(term, range(width)))).astype(x_BxLxN.dtype)
