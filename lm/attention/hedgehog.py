"""Hedgehog: a learned feature map that mimics softmax attention (Zhang et al. 2024).

    φ(x) = [softmax(W x), softmax(-W x)]

with a matrix W per head, which starts at the identity, and softmax over the features. No weight is negative. A `FLOOR`
under the features keeps the features of long vectors from vanishing together.
"""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from lm.attention.base import HeadDims
from lm.attention.linear import LinearAttention, LinearModule, linear_flops_per_token
from lm.attention.maps.products import ProductFeatures
from lm.config.configurable import configurable, field
from lm.ops.linear_attention import LinearCall, Options
from lm.parameters import declare

FLOOR = 1e-12
"""A number added to each feature. The features of a query and of all its keys may be large in different places; then
all products, and the denominator, would be zero in float32."""


@configurable('hedgehog')
class Hedgehog(LinearAttention):
    """Weights ⟨φ(q_i), φ(k_j)⟩ / Σ_j' ⟨φ(q_i), φ(k_j')⟩, with two features for each number of a head."""

    per_head: bool = field(default=True, help='W of each head its own; False: one for all, which TPU kernels compute')

    def build(self, dims: HeadDims, rngs: nnx.Rngs) -> 'HedgehogAttention':
        return HedgehogAttention(self, dims)

    def flops_per_token(self, dims: HeadDims, length: int) -> float:
        products = 2.0 * dims.head_dim**2 * (dims.n_heads + dims.n_kv_heads)
        return products + linear_flops_per_token(dims, length, 2 * dims.head_dim, 2 * dims.head_dim)

    def why_causal(self) -> None:
        return None

    @classmethod
    def kernel_forms(cls) -> dict[str, Self]:
        return {'hedgehog 128': cls(per_head=False)}


@dataclasses.dataclass(frozen=True)
class TwoSidedSoftmax(ProductFeatures):
    """φ; its parameters are W, [R, E] or [N, R, E]."""

    def products(self, weight: jax.Array) -> tuple[jax.Array, None]:
        return weight, None

    def of_products(self, wx_RxT: jax.Array, x_ExT: jax.Array, queries: bool) -> jax.Array:
        parts = [jnp.exp(s - lax.stop_gradient(s.max(0, keepdims=True))) for s in (wx_RxT, -wx_RxT)]
        return jnp.concatenate([part / part.sum(0, keepdims=True) + FLOOR for part in parts])


class HedgehogAttention(LinearModule):
    """The matrices W of queries and keys."""

    def __init__(self, config: Hedgehog, dims: HeadDims):
        self.config = config
        self.dims = dims
        eye = jnp.eye(dims.head_dim)
        if config.per_head:
            kind = declare('matrix', 'heads', 'features', 'head')
            weights = [jnp.tile(eye, (n, 1, 1)) for n in (dims.n_heads, dims.n_kv_heads)]
        else:
            kind, weights = declare('matrix', 'features', 'head'), [eye, eye]
        self.q_weight, self.k_weight = (nnx.Param(weight, **kind) for weight in weights)

    def make_call(self, q_BxLxHxD: jax.Array, k_BxLxKxD: jax.Array, v_BxLxKxD: jax.Array) -> LinearCall:
        options = Options(feature_map=TwoSidedSoftmax(), denominator_bias=0.0)
        weights = (self.q_weight[...], self.k_weight[...])
        return LinearCall(q_BxLxHxD, k_BxLxKxD, v_BxLxKxD, *weights, options=options)
