"""Short convolutions as their formula reads: a sum of shifted arrays."""

import jax
import jax.numpy as jnp


def short_convolution(
    x_BxLxN: jax.Array, kernel_SxN: jax.Array, before_BxRxN: jax.Array | None, reach_BxL: jax.Array | None
) -> jax.Array:
    """Arguments as in `lm.ops.short_convolution`."""
    (batch, length, channels), width = x_BxLxN.shape, kernel_SxN.shape[0]
    if before_BxRxN is None:
        before_BxRxN = jnp.zeros((batch, width - 1, channels))
    all_BxMxN = jnp.concatenate([before_BxRxN.astype(x_BxLxN.dtype), x_BxLxN], axis=1)

    def term(s):
        x = all_BxMxN[:, width - 1 - s : width - 1 - s + length].astype(jnp.float32)
        if reach_BxL is not None and s:
            x = jnp.where((reach_BxL >= s)[..., None], x, 0.0)
        return kernel_SxN[s] * x

    return jax.nn.silu(sum(map(term, range(width)))).astype(x_BxLxN.dtype)


def unsupported(*args) -> None:
    """Everything is supported."""
