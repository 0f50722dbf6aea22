"""What mechanisms on `lm.ops.linear_attention` share: decoding from a constant-size state, signed weights, cost."""

from typing import Any

import jax
import jax.numpy as jnp

from lm.attention.base import AttentionModule, HeadDims
from lm.ops.linear_attention import decode, linear_attention

DEFAULT_BLOCK = 128
"""Tokens a block that `linear_flops_per_token` counts where the operation chooses the block itself."""


class LinearModule(AttentionModule):
    """A mechanism that is one call of `lm.ops.linear_attention`, whose arguments `arguments` makes.

    Where weights may be negative their sum may come near zero. Such mechanisms set `signed` and let the call give
    sums, not means: a denominator S (`bias` included) within `epsilon` of 0 is then replaced by S + 2 epsilon. It rides
    along as one more column of the values, in float32 (Choromanski et al. 2020, Algorithm 1: C = [V 1]).
    """

    dims: HeadDims
    signed = False
    bias = 0.0
    epsilon = 0.0

    def arguments(self, q_BxLxHxD: jax.Array, k_BxLxKxD: jax.Array, v_BxLxKxD: jax.Array) -> dict[str, Any]:
        """Of the call. With `signed` they hold normalize = False."""
        raise NotImplementedError

    def __call__(self, q_BxLxHxD: jax.Array, k_BxLxKxD: jax.Array, v_BxLxKxD: jax.Array) -> jax.Array:
        o_BxLxHxC = linear_attention(**self.arguments(q_BxLxHxD, k_BxLxKxD, self._columns(v_BxLxKxD)))
        return self._divided(o_BxLxHxC, v_BxLxKxD.dtype)

    def init_state(self, batch: int, max_length: int, dtype: Any) -> decode.DecodeState:
        """The sums over no keys, float32; their size does not depend on `max_length`."""
        heads = (self.dims.n_heads, self.dims.n_kv_heads, self.dims.n_kv_heads)
        q_Bx1xHxD, k_Bx1xKxD, v_Bx1xKxD = (jnp.zeros((batch, 1, n, self.dims.head_dim), dtype) for n in heads)
        return decode.init_state(**self.arguments(q_Bx1xHxD, k_Bx1xKxD, self._columns(v_Bx1xKxD)))

    def decode_step(
        self, state: decode.DecodeState, q_BxTxHxD: jax.Array, k_BxTxKxD: jax.Array, v_BxTxKxD: jax.Array
    ) -> tuple[decode.DecodeState, jax.Array]:
        state, o_BxTxHxC = decode.decode_step(state, **self.arguments(q_BxTxHxD, k_BxTxKxD, self._columns(v_BxTxKxD)))
        return state, self._divided(o_BxTxHxC, v_BxTxKxD.dtype)

    def _columns(self, v_BxLxKxD):
        if not self.signed:
            return v_BxLxKxD
        ones = jnp.ones((*v_BxLxKxD.shape[:-1], 1), jnp.float32)
        return jnp.concatenate([v_BxLxKxD.astype(jnp.float32), ones], axis=-1)

    def _divided(self, o_BxLxHxC, dtype):
        if not self.signed:
            return o_BxLxHxC
        total = o_BxLxHxC[..., -1:] + self.bias
        return (o_BxLxHxC[..., :-1] / (total + 2 * self.epsilon * (jnp.abs(total) <= self.epsilon))).astype(dtype)


def linear_flops_per_token(
    dims: HeadDims, length: int, n_features: int, compared: int, *, block: int | None = None, causal: bool = True
) -> float:
    """Of the products of the block engine, features given.

    Args:
        dims: the layer's heads.
        length: tokens of a sequence.
        n_features: numbers that each query multiplies with the sums over earlier blocks.
        compared: size of the vectors whose inner products are the weights inside a block.
        block: tokens a block.
        causal: False has no blocks.
    """
    sums = 2.0 * n_features * (dims.head_dim * (dims.n_heads + dims.n_kv_heads) + dims.n_heads)
    if not causal:
        return sums
    block = min(length, block or DEFAULT_BLOCK)
    inside = dims.n_heads * (compared + dims.head_dim) * block
    return inside if length == block else inside + sums
