"""Short causal convolutions of queries, keys and values (`lm.ops.short_convolution`)."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from lm.ops import platform, sequence
from lm.ops.short_convolution import short_convolution
from lm.parameters import declare


class ShortConvolution(nnx.Module):
    """y_t = silu(Σ_{0 ≤ s < width} w_s x_{t-s}); before the first token x is 0.

    What later tokens need of those seen is the last width - 1 of them, [B, width - 1, N].
    """

    def __init__(self, channels: int, width: int, rngs: nnx.Rngs, part: str):
        limit = width**-0.5
        kernel = jax.random.uniform(rngs.params(), (width, channels), jnp.float32, -limit, limit)
        self.kernel = nnx.Param(kernel, **declare('gain', 'reach', 'all_heads', part=part))

    def init_state(self, batch: int, dtype: DTypeLike) -> jax.Array:
        """Returns the tokens before the first."""
        width, channels = self.kernel.shape
        return jnp.zeros((batch, width - 1, channels), dtype)

    def __call__(
        self,
        xs: Sequence[jax.Array],
        before_BxRxN: jax.Array | None = None,
        starts_BxL: jax.Array | None = None,
    ) -> tuple[list[jax.Array], jax.Array]:
        """(ys, the state after the tokens).

        Args:
            xs: the channels in pieces, [B, L, …] each: tokens of a window, or of one part of it (`lm.ops.sequence`).
            before_BxRxN: the state before them; None: a window begins.
            starts_BxL: the first token of each token's document, before which x is 0.
        """
        width, length = self.kernel.shape[0], xs[0].shape[1]
        reach_BxL = None
        if starts_BxL is not None:
            reach_BxL = sequence.index() * length + jnp.arange(length) - starts_BxL
        cuts = np.cumsum([x.shape[-1] for x in xs])[:-1]
        kernels = jnp.split(self.kernel[...], cuts, axis=1)
        if before_BxRxN is not None:
            befores = jnp.split(before_BxRxN, cuts, axis=-1)
        elif platform.sequence_shards() > 1:
            befores = [sequence.tokens_before(x, width - 1) for x in xs]
        else:
            befores = [None] * len(xs)
        ys = [short_convolution(*arrays, reach_BxL) for arrays in zip(xs, kernels, befores, strict=True)]
        return ys, self._after(xs, befores)

    def _after(self, xs, befores):
        """Returns the last tokens of all channels."""
        count = self.kernel.shape[0] - 1

        def last(x, before):
            if before is None:
                before = jnp.zeros((x.shape[0], count, x.shape[2]), x.dtype)
            return jnp.concatenate([before.astype(x.dtype), x], axis=1)[:, x.shape[1] :]

        return jnp.concatenate([last(*pair) for pair in zip(xs, befores, strict=True)], axis=-1)
