"""Polynomial attention: an even power of the scores of layer-normalized queries and keys (PolySketchFormer §2.1)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lm.attention.base import Attention, AttentionModule, HeadDims
from lm.attention.softmax import exact_flops_per_token
from lm.config.configurable import configurable, field
from lm.ops.exact_attention import cache, polynomial_attention
from lm.parameters import layer_norm


@configurable('polynomial')
class Polynomial(Attention):
    """Weights ⟨q'_i, k'_j⟩^degree / (bias + Σ_j' ⟨q'_i, k'_j'⟩^degree), where ' is layer normalization."""

    # Layer-normalized vectors of size 64 have scores up to 64: their 20th power, summed, leaves float32.
    degree: int = field(
        4, minimum=2, maximum=16, even=True, help='power of the scores; quality equals softmax from 4 on'
    )
    bias: float = field(1.0, above=0, help='keeps the denominator from zero')

    def build(self, dims: HeadDims, rngs: nnx.Rngs) -> 'PolynomialAttention':
        return PolynomialAttention(self, dims, rngs)

    def flops_per_token(self, dims: HeadDims, length: int) -> float:
        return exact_flops_per_token(dims, length)


class PolynomialAttention(AttentionModule):
    """Two layer normalizations, one for queries and one for keys, each shared by the heads of the layer."""

    def __init__(self, config: Polynomial, dims: HeadDims, rngs: nnx.Rngs):
        self.config = config
        self.dims = dims
        self.q_norm, self.k_norm = (
            layer_norm(dims.head_dim, 'head', rngs, dtype=jnp.float32, use_fast_variance=False) for _ in range(2)
        )

    def normalize(self, q_BxLxHxD: jax.Array, k_BxLxKxD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Statistics in float32, results in the inputs' dtypes."""
        return self.q_norm(q_BxLxHxD).astype(q_BxLxHxD.dtype), self.k_norm(k_BxLxKxD).astype(k_BxLxKxD.dtype)

    def __call__(self, q_BxLxHxD: jax.Array, k_BxLxKxD: jax.Array, v_BxLxKxD: jax.Array) -> jax.Array:
        q_BxLxHxD, k_BxLxKxD = self.normalize(q_BxLxHxD, k_BxLxKxD)
        return polynomial_attention(q_BxLxHxD, k_BxLxKxD, v_BxLxKxD, degree=self.config.degree, bias=self.config.bias)

    def init_state(self, batch: int, max_length: int, dtype: Any) -> cache.Cache:
        """A cache of `max_length` normalized keys and values."""
        return cache.empty(self.dims, batch, max_length, dtype)

    def decode_step(
        self, state: cache.Cache, q_BxTxHxD: jax.Array, k_BxTxKxD: jax.Array, v_BxTxKxD: jax.Array
    ) -> tuple[cache.Cache, jax.Array]:
        q_BxTxHxD, k_BxTxKxD = self.normalize(q_BxTxHxD, k_BxTxKxD)
        state, seen = cache.append(state, k_BxTxKxD, v_BxTxKxD)
        o_BxTxHxD = polynomial_attention(
            q_BxTxHxD,
            seen.k_BxMxKxD,
            seen.v_BxMxKxD,
            degree=self.config.degree,
            bias=self.config.bias,
            q_offset=seen.q_offset,
            k_start=seen.k_start,
            implementation='xla',
        )
        return state, o_BxTxHxD
