"""Retention: linear attention whose keys fade at a constant rate of each head (Sun et al. 2023, RetNet, §2).

    S_i = γ_h S_{i-1} + k_i v_iᵀ        o_i = RMSNorm(S_iᵀ q_i / √d)        γ_h = 1 - 2^(-5 - h)

The rotation of q and k is the model's; xPos, which also scales them by position, is left out, as in the authors' code.
The gate of §2.3, silu(x W) ⊙ o, is `model.output_gate`.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from lm.attention.base import HeadDims
from lm.attention.linear import LinearAttention, LinearModule, linear_flops_per_token
from lm.config.configurable import configurable, field
from lm.ops.decay import constant
from lm.ops.linear_attention import LinearCall, Options
from lm.parameters import EPSILON, rms_norm


@configurable('retention')
class Retention(LinearAttention):
    """Weights γ^(i - j) ⟨q_i, k_j⟩ without a denominator; each head's output is normalized instead."""

    layer_type = 'multi_scale_retention'
    numbers_heads = True

    norm_epsilon: float = field(
        default=EPSILON,
        above=0,
        maximum=0.1,
        omit_default=True,
        help='added to the variance of what each head gives',
    )

    def build(self, dims: HeadDims, rngs: nnx.Rngs) -> 'RetentionAttention':
        return RetentionAttention(self, dims, rngs)

    def flops_per_token(self, dims: HeadDims, length: int) -> float:
        return linear_flops_per_token(dims, length, dims.head_dim, dims.head_dim)

    def portable(self, dims: HeadDims) -> dict[str, object]:
        return super().portable(dims) | {'value_size': dims.value_size}


class RetentionAttention(LinearModule):
    """The gain of the normalization, shared by the heads, is all that it learns."""

    def __init__(self, config: Retention, dims: HeadDims, rngs: nnx.Rngs):
        self.config = config
        self.dims = dims
        self.log_factor = -math.log(dims.head_dim) / 2
        self.out_norm = rms_norm(dims.value_size, 'head', rngs, dtype=jnp.float32, epsilon=config.norm_epsilon)

    def make_call(self, q_BxLxHxD: jax.Array, k_BxLxKxD: jax.Array, v_BxLxKxD: jax.Array) -> LinearCall:
        batch, length, heads = k_BxLxKxD.shape[:3]
        return LinearCall(
            q_BxLxHxD,
            k_BxLxKxD,
            v_BxLxKxD,
            log_decay_BxLxK=constant(jnp.log1p(-(2.0 ** (-5.0 - jnp.arange(heads)))), batch, length),
            options=Options(normalize=False),
        )

    def outputs(self, o_BxLxHxD: jax.Array, v_BxLxKxD: jax.Array) -> jax.Array:
        return self.out_norm(o_BxLxHxD).astype(o_BxLxHxD.dtype)
