"""Softmax attention, over all earlier tokens or a sliding window of them."""

from typing import Any

import jax
from flax import nnx

from lm.attention.base import Attention, AttentionModule, HeadDims
from lm.config.configurable import configurable, field
from lm.ops.exact_attention import cache, softmax_attention


@configurable('softmax')
class Softmax(Attention):
    """Weights exp(scale ⟨q_i, k_j⟩) / Σ_j' exp(scale ⟨q_i, k_j'⟩) (PolySketchFormer §2.1)."""

    kernels_declare_cost = False  # JAX's splash attention

    scale: float | None = field(None, above=0, help='factor of the scores; None is 1 / sqrt(head size)')
    window: int | None = field(None, minimum=1, help='tokens that a query sees, itself included; None sees all')

    def build(self, dims: HeadDims, rngs: nnx.Rngs) -> 'SoftmaxAttention':
        return SoftmaxAttention(self, dims)

    def flops_per_token(self, dims: HeadDims, length: int) -> float:
        return exact_flops_per_token(dims, length, self.window)


class SoftmaxAttention(AttentionModule):
    """Has no parameters."""

    def __init__(self, config: Softmax, dims: HeadDims):
        self.config = config
        self.dims = dims

    def __call__(self, q_BxLxHxD: jax.Array, k_BxLxKxD: jax.Array, v_BxLxKxD: jax.Array) -> jax.Array:
        return softmax_attention(q_BxLxHxD, k_BxLxKxD, v_BxLxKxD, scale=self.config.scale, window=self.config.window)

    def init_state(self, batch: int, max_length: int, dtype: Any) -> cache.Cache:
        """A cache of `max_length` tokens, or of the window where that is shorter."""
        length = min(max_length, self.config.window or max_length)
        return cache.empty(batch, length, self.dims.n_kv_heads, self.dims.head_dim, dtype)

    def decode_step(
        self, state: cache.Cache, q_BxTxHxD: jax.Array, k_BxTxKxD: jax.Array, v_BxTxKxD: jax.Array
    ) -> tuple[cache.Cache, jax.Array]:
        store = cache.append if self.config.window is None else cache.slide
        state, seen = store(state, k_BxTxKxD, v_BxTxKxD)
        o_BxTxHxD = softmax_attention(
            q_BxTxHxD,
            seen.k_BxMxKxD,
            seen.v_BxMxKxD,
            scale=self.config.scale,
            window=self.config.window,
            q_offset=seen.q_offset,
            k_start=seen.k_start,
            implementation='xla',
        )
        return state, o_BxTxHxD


def exact_flops_per_token(dims: HeadDims, length: int, window: int | None = None) -> float:
    """Two products of size head_dim (scores, mixture of values) for each key that a query sees on average."""
    window = min(length, window or length)
    seen = window - window**2 / (2 * length)
    return 4.0 * dims.n_heads * dims.head_dim * seen
