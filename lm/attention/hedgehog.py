"""Hedgehog: a learned feature map that mimics softmax attention (Zhang et al. 2024).

    φ(x) = [softmax(W x), softmax(-W x)]

with a matrix W per head, which starts at the identity, and softmax over the features. No weight is negative.
"""

from typing import Self

import jax
from flax import nnx

from lm.attention.base import HeadDims
from lm.attention.linear import LinearAttention, LinearModule, linear_flops_per_token
from lm.attention.maps.two_sided import TWO_SIDED, make_weights, weight_flops
from lm.config.configurable import configurable, field
from lm.ops.linear_attention import LinearCall, Options


@configurable('hedgehog')
class Hedgehog(LinearAttention):
    """Weights ⟨φ(q_i), φ(k_j)⟩ / Σ_j' ⟨φ(q_i), φ(k_j')⟩, with two features for each number of a head."""

    published_beside_window = True

    per_head: bool = field(default=True, help='W of each head its own; False: one for all, which TPU kernels compute')

    def build(self, dims: HeadDims, rngs: nnx.Rngs) -> 'HedgehogAttention':
        return HedgehogAttention(self, dims)

    def flops_per_token(self, dims: HeadDims, length: int) -> float:
        return weight_flops(dims) + linear_flops_per_token(dims, length, 2 * dims.head_dim, 2 * dims.head_dim)

    def why_causal(self) -> None:
        return None

    @classmethod
    def kernel_forms(cls) -> dict[str, Self]:
        return {'hedgehog 128': cls(per_head=False)}


class HedgehogAttention(LinearModule):
    """The matrices W of queries and keys."""

    def __init__(self, config: Hedgehog, dims: HeadDims):
        self.config = config
        self.dims = dims
        self.q_weight, self.k_weight = make_weights(dims, config.per_head)

    def make_call(self, q_BxLxHxD: jax.Array, k_BxLxKxD: jax.Array, v_BxLxKxD: jax.Array) -> LinearCall:
        options = Options(feature_map=TWO_SIDED, denominator_bias=0.0)
        weights = (self.q_weight[...], self.k_weight[...])
        return LinearCall(q_BxLxHxD, k_BxLxKxD, v_BxLxKxD, *weights, options=options)
