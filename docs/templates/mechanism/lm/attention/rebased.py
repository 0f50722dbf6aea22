"""ReBased: squares of scores of compressed, normalized queries and keys (Aksenov et al. 2024).

    weights ⟨q'_i, k'_j⟩² / (b + Σ_j' ⟨q'_i, k'_j'⟩²)     x' = γ ∗ norm(W x) + β

with W, γ and β of queries and of keys each, shared by the heads of a layer.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from lm.attention.base import HeadDims
from lm.attention.linear import LinearAttention, LinearModule, linear_flops_per_token
from lm.config.configurable import configurable, field
from lm.ops.linear_attention import SQUARE, LinearCall, Options
from lm.parameters import declare, layer_norm


# The configuration. Its fields are what a gin file can set; their ranges are checked when a file is read.
@configurable('rebased')
class Rebased(LinearAttention):
    """Squares of scores, in linear time: Σ_j ⟨q, k_j⟩² v_j = Σ_j ⟨q ⊗ q, k_j ⊗ k_j⟩ v_j."""

    feature_dim: int = field(default=16, minimum=1, help='size of compressed queries and keys')
    denominator_bias: float = field(default=1.0, above=0, help='b: keeps the denominator from zero')

    def build(self, dims: HeadDims, rngs: nnx.Rngs) -> 'RebasedAttention':
        return RebasedAttention(self, dims, rngs)

    def flops_per_token(self, dims: HeadDims, length: int) -> float:
        compress = 2.0 * dims.head_dim * self.feature_dim * (dims.n_heads + dims.n_kv_heads)
        n_features = self.feature_dim * (self.feature_dim + 1) // 2  # the products x ⊗ x that differ
        return compress + linear_flops_per_token(dims, length, n_features, self.feature_dim)

    # Tokens may see later ones (`model.causal = False`). Leave this out where weights depend on the order of tokens.
    def why_causal(self) -> None:
        return None


# The module of one layer. `LinearModule` trains, prefills and decodes it from the one call that `make_call` makes.
class RebasedAttention(LinearModule):
    """W, γ and β."""

    def __init__(self, config: Rebased, dims: HeadDims, rngs: nnx.Rngs):
        self.config = config
        self.dims = dims
        shape = (dims.head_dim, config.feature_dim)
        init = nnx.initializers.lecun_normal()
        # Each parameter declares its kind and its axes: weight decay, sharding and counts read them.
        kind = declare('matrix', 'head', 'features')
        self.q_weight, self.k_weight = (nnx.Param(init(rngs.params(), shape), **kind) for _ in range(2))
        self.q_norm, self.k_norm = (layer_norm(config.feature_dim, 'features', rngs) for _ in range(2))

    def make_call(self, q_BxLxHxD: jax.Array, k_BxLxKxD: jax.Array, v_BxLxKxD: jax.Array) -> LinearCall:
        q_BxLxHxR = compressed(q_BxLxHxD, self.q_weight, self.q_norm)
        k_BxLxKxR = compressed(k_BxLxKxD, self.k_weight, self.k_norm)
        options = Options(powers=SQUARE, denominator_bias=self.config.denominator_bias)
        return LinearCall(q_BxLxHxR, k_BxLxKxR, v_BxLxKxD, options=options)


def compressed(x_BxLxNxD: jax.Array, weight_DxR: nnx.Param, norm: nnx.LayerNorm) -> jax.Array:
    """Returns γ ∗ norm(W x) + β, [B, L, N, R] in the dtype of x; products and statistics are float32."""
    return norm(x_BxLxNxD.astype(jnp.float32) @ weight_DxR[...]).astype(x_BxLxNxD.dtype)
