"""The feature map of Hedgehog, which mimics softmax attention (Zhang et al. 2024).

    φ(x) = [softmax(W x), softmax(-W x)]

with softmax over the features. No weight is negative. A `FLOOR` under the features keeps the features of long vectors
from vanishing together.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from lm.attention.base import HeadDims
from lm.attention.maps.products import ProductFeatures
from lm.parameters import declare

FLOOR = 1e-12
"""A number added to each feature. The features of a query and of all its keys may be large in different places; then
all products, and the denominator, would be zero in float32."""


class TwoSidedSoftmax(ProductFeatures):
    """φ; its parameters are W, [R, E] or [N, R, E]."""

    def products(self, weight: jax.Array) -> tuple[jax.Array, None]:
        return weight, None

    def of_products(self, wx_RxT: jax.Array, x_ExT: jax.Array, queries: bool) -> jax.Array:
        parts = [jnp.exp(s - lax.stop_gradient(s.max(0, keepdims=True))) for s in (wx_RxT, -wx_RxT)]
        return jnp.concatenate([part / part.sum(0, keepdims=True) + FLOOR for part in parts])


TWO_SIDED = TwoSidedSoftmax()
"""The map, which has no options: operations are compiled for this one."""


def make_weights(dims: HeadDims, per_head: bool) -> tuple[nnx.Param, nnx.Param]:
    """Returns W of queries and of keys, which start at the identity; each head has its own, or all share one."""
    eye = jnp.eye(dims.head_dim)
    if per_head:
        kind = declare('matrix', 'heads', 'features', 'head')
        weights = [jnp.tile(eye, (n, 1, 1)) for n in (dims.n_heads, dims.n_kv_heads)]
    else:
        kind, weights = declare('matrix', 'features', 'head'), [eye, eye]
    q_weight, k_weight = (nnx.Param(weight, **kind) for weight in weights)
    return q_weight, k_weight


def weight_flops(dims: HeadDims) -> float:
    """Returns the operations per token of the products W x."""
    return 2.0 * dims.head_dim**2 * (dims.n_heads + dims.n_kv_heads)
