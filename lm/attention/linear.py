"""What mechanisms with weights ⟨φ(q), φ(k)⟩ share: decoding from constant-size sums, signed weights, cost."""

from typing import Any

import jax
import jax.numpy as jnp

from lm.attention.base import AttentionModule, HeadDims
from lm.ops.linear_attention import State, linear_attention

DEFAULT_BLOCK = 128
"""Tokens a block that `flops_per_token` counts where the operation chooses the block itself."""


class LinearModule(AttentionModule):
    """A mechanism that is one call of `lm.ops.linear_attention`: its state is that call's."""

    dims: HeadDims

    def attend(self, q_BxLxHxD: jax.Array, k_BxLxKxD: jax.Array, v_BxLxKxD: jax.Array, **state: Any) -> Any:
        """The call. `state` holds `initial_state` and `return_state`, or nothing."""
        raise NotImplementedError

    def __call__(self, q_BxLxHxD: jax.Array, k_BxLxKxD: jax.Array, v_BxLxKxD: jax.Array) -> jax.Array:
        return self.attend(q_BxLxHxD, k_BxLxKxD, v_BxLxKxD)

    def init_state(self, batch: int, max_length: int, dtype: Any) -> State:
        """The sums over no keys, float32; their size depends neither on `max_length` nor on `dtype`."""
        heads = (self.dims.n_heads, self.dims.n_kv_heads, self.dims.n_kv_heads)
        qkv = [jax.ShapeDtypeStruct((batch, 1, n, self.dims.head_dim), dtype) for n in heads]
        _, shapes = jax.eval_shape(lambda *x: self.attend(*x, return_state=True), *qkv)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def step(
        self, state: State, q_BxTxHxD: jax.Array, k_BxTxKxD: jax.Array, v_BxTxKxD: jax.Array
    ) -> tuple[State, jax.Array]:
        o_BxTxHxD, state = self.attend(q_BxTxHxD, k_BxTxKxD, v_BxTxKxD, initial_state=state, return_state=True)
        return state, o_BxTxHxD


def signed_attention(
    q: jax.Array, k: jax.Array, v_BxLxKxD: jax.Array, *, epsilon: float, bias: float = 0.0, **options: Any
) -> Any:
    """`linear_attention`, normalised, where weights may be negative and their sum may come near zero.

    A sum S within epsilon of 0 is replaced by S + 2 epsilon. The sums ride along as one more column of the values, in
    float32 (Choromanski et al. 2020, Algorithm 1: C = [V 1]).
    """
    ones = jnp.ones((*v_BxLxKxD.shape[:-1], 1), jnp.float32)
    columns = jnp.concatenate([v_BxLxKxD.astype(jnp.float32), ones], axis=-1)
    result = linear_attention(q, k, columns, bias=0.0, normalize=False, **options)
    o, state = result if options.get('return_state') else (result, None)
    total = o[..., -1:] + bias
    o_BxLxHxD = (o[..., :-1] / (total + 2 * epsilon * (jnp.abs(total) <= epsilon))).astype(v_BxLxKxD.dtype)
    return o_BxLxHxD if state is None else (o_BxLxHxD, state)


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
