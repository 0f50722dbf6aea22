"""Taylor attention: the second-order series of exp on compressed queries and keys, the linear layers of BASED.

Arora et al. (2024), as LLoPS §2.2 describes it (eq. 4, 5 and footnote 2): s = ⟨W_q q, W_k k⟩ / √r and weights
1 + s + s²/2 = ½ + ½ (1 + s)², never below ½. BASED alternates such layers with sliding-window softmax:
`model.attention = [@taylor(), @softmax()]`.
"""

from typing import Self

import jax
import jax.numpy as jnp
from flax import nnx

from lm.attention.base import HeadDims
from lm.attention.linear import LinearAttention, LinearModule, linear_flops_per_token
from lm.config.configurable import configurable, field
from lm.ops.linear_attention import LinearCall, Options
from lm.parameters import declare

SERIES = (1.0, 1.0, 0.5)


@configurable('taylor')
class Taylor(LinearAttention):
    """Weights 1 + s + s²/2 with s = ⟨W_q q, W_k k⟩ / sqrt(feature_dim), normalised."""

    feature_dim: int | None = field(
        default=16, minimum=1, help='size of compressed queries and keys; None: not compressed'
    )
    per_head: bool = field(default=True, help='W_q and W_k of each head its own (BASED); False: one pair a layer')

    def build(self, dims: HeadDims, rngs: nnx.Rngs) -> 'TaylorAttention':
        return TaylorAttention(self, dims, rngs)

    def flops_per_token(self, dims: HeadDims, length: int) -> float:
        size = self.feature_dim or dims.head_dim
        compress = 2.0 * dims.head_dim * size * (dims.n_heads + dims.n_kv_heads) if self.feature_dim else 0.0
        return compress + linear_flops_per_token(dims, length, 1 + size + size * (size + 1) // 2, size)

    def why_causal(self) -> None:
        return None

    @classmethod
    def kernel_forms(cls) -> dict[str, Self]:
        return {'taylor 16': cls(feature_dim=16)}


class TaylorAttention(LinearModule):
    """W_q and W_k. The products x ⊗ x are packed (their symmetric half) by the operation, block by block."""

    def __init__(self, config: Taylor, dims: HeadDims, rngs: nnx.Rngs):
        self.config = config
        self.dims = dims
        if config.feature_dim is None:
            self.q_weight = self.k_weight = None
            return
        init = nnx.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=0)
        kind = declare('matrix', 'heads', 'head', 'features')
        self.q_weight, self.k_weight = (
            nnx.Param(init(rngs.params(), (heads if config.per_head else 1, dims.head_dim, config.feature_dim)), **kind)
            for heads in (dims.n_heads, dims.n_kv_heads)
        )

    def make_call(self, q_BxLxHxD: jax.Array, k_BxLxKxD: jax.Array, v_BxLxKxD: jax.Array) -> LinearCall:
        q_BxLxHxR, k_BxLxKxR = compress(q_BxLxHxD, self.q_weight), compress(k_BxLxKxD, self.k_weight)
        options = Options(powers=SERIES, denominator_bias=0.0)
        return LinearCall(q_BxLxHxR, k_BxLxKxR, v_BxLxKxD, options=options)


def compress(x_BxLxNxD: jax.Array, weight_NxDxR: nnx.Param | None) -> jax.Array:
    """Returns r^(-1/4) x W, whose inner products are s; the weight's leading axis is the heads or 1."""
    if weight_NxDxR is None:
        return x_BxLxNxD * x_BxLxNxD.shape[-1] ** -0.25
    w_NxDxR = weight_NxDxR[...] * weight_NxDxR.shape[-1] ** -0.25
    w_NxDxR = jnp.broadcast_to(w_NxDxR, (x_BxLxNxD.shape[2], *w_NxDxR.shape[1:]))
    return jnp.einsum('blnd,ndr->blnr', x_BxLxNxD.astype(jnp.float32), w_NxDxR).astype(x_BxLxNxD.dtype)
