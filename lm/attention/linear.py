"""The base of mechanisms on `lm.ops.linear_attention`: decoding from a constant-size state, signed weights, cost."""

import abc
import dataclasses
import math
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from lm.attention.base import Attention, AttentionModule, HeadDims
from lm.ops.documents import forgetting
from lm.ops.linear_attention import LinearCall, compute, decode
from lm.ops.powers import quotient

DEFAULT_BLOCK = 128
"""Tokens per block for `linear_flops_per_token` where the operation chooses the block."""


class LinearAttention(Attention):
    """A configuration whose module is a `LinearModule`."""

    published_beside_window: ClassVar[bool] = False
    """A published mechanism puts its weights as they are beside a window of softmax."""

    @abc.abstractmethod
    def build(self, dims: HeadDims, rngs: nnx.Rngs) -> 'LinearModule':
        """Returns the module of one layer."""

    def why_whole(self, causal: bool) -> str | None:
        if causal and self.causal:
            return None
        setting = f'{self.gin_name if causal else "model"}.causal = False'
        return f'@{self.gin_name}() shares no window where {setting}; set mesh.sequence = 1, or take @softmax()'

    @classmethod
    def kernel_forms(cls) -> dict[str, Self]:
        """Returns name → settings in which the compiled kernels differ; `scripts/kernels` compiles each of them."""
        return {cls.gin_name: cls()}


class LinearModule(AttentionModule):
    """A mechanism that makes one call of `lm.ops.linear_attention`, which `make_call` makes.

    Negative weights may have a sum near zero. Mechanisms with such weights set `signed`, and their call returns sums in
    place of means. A denominator S (with `denominator_bias`) within `epsilon` of 0 is replaced by S + 2 epsilon. The
    denominator is one more column of the values, in float32 (Choromanski et al. 2020, Algorithm 1: C = [V 1]).
    """

    dims: HeadDims
    signed = False
    denominator_bias = 0.0
    epsilon = 0.0
    implementation: str | None = None
    """The implementation of the operation that training requests; decoding has only one."""
    log_factor = 0.0
    """The log of a number that its call leaves out of all weights.

    It matters where other weights stand beside them, and where the call returns sums. Sums are multiplied by it: a
    product with queries would be one more pass between the kernels of TPUs.
    """
    estimates_softmax = False
    """Its weights estimate exp(⟨q, k⟩ / √D): a window of softmax has the same unit."""

    @abc.abstractmethod
    def make_call(self, q_BxLxHxD: jax.Array, k_BxLxKxD: jax.Array, v_BxLxKxD: jax.Array) -> LinearCall:
        """Returns the call of the operation for queries and keys from `normalize`.

        With `signed`, its option `normalize` is False. A mechanism with `projections` takes them as further arguments.
        """

    def mix(
        self,
        q_BxLxHxD: jax.Array,
        k_BxLxKxD: jax.Array,
        v_BxLxKxD: jax.Array,
        *projected: jax.Array | None,
        starts_BxL: jax.Array | None = None,
        **named: jax.Array,
    ) -> jax.Array:
        call = self.make_call(q_BxLxHxD, k_BxLxKxD, self._columns(v_BxLxKxD), *projected, **named)
        if not self.dims.causal:
            call = dataclasses.replace(call, options=dataclasses.replace(call.options, causal=False))
        o_BxLxHxC = compute(self._separate(call, starts_BxL), self.implementation).o_BxLxHxD
        return self._divided(call, o_BxLxHxC, v_BxLxKxD.dtype)

    def init_state(self, batch: int, max_length: int, dtype: DTypeLike, documents: bool = False) -> decode.DecodeState:
        """Returns sums over no keys, float32, of one size for any length, and room for exactly compared keys."""
        dims = self.dims
        q_Bx1xHxD, k_Bx1xKxD, v_Bx1xKxD = (
            jnp.zeros((batch, 1, n, size), dtype)
            for n, size in (
                (dims.n_heads, dims.head_dim),
                (dims.n_kv_heads, dims.head_dim),
                (dims.n_kv_heads, dims.value_size),
            )
        )
        call = self.make_call(*self.normalize(q_Bx1xHxD, k_Bx1xKxD), self._columns(v_Bx1xKxD))
        starts_Bx1 = jnp.zeros((batch, 1), jnp.int32) if documents else None
        return decode.init_state(self._separate(call, starts_Bx1), max_length)

    def decode_step(
        self,
        state: decode.DecodeState,
        q_BxTxHxD: jax.Array,
        k_BxTxKxD: jax.Array,
        v_BxTxKxD: jax.Array,
        *projected: jax.Array,
        starts_BxT: jax.Array | None = None,
        **named: jax.Array,
    ) -> tuple[decode.DecodeState, jax.Array]:
        v_BxTxKxC = self._columns(v_BxTxKxD)
        call = self.make_call(*self.normalize(q_BxTxHxD, k_BxTxKxD), v_BxTxKxC, *projected, **named)
        state, o_BxTxHxC = decode.decode_step(state, self._separate(call, starts_BxT))
        return state, self.outputs(self._divided(call, o_BxTxHxC, v_BxTxKxD.dtype), v_BxTxKxD)

    def _separate(self, call: LinearCall, starts_BxL: jax.Array | None) -> LinearCall:
        """Returns the call in which documents do not see each other: their starts, if there are any, become decay."""
        if starts_BxL is None:
            return call
        log_decay_BxLxK = forgetting(starts_BxL, call.log_decay_BxLxK, self.dims.n_kv_heads)
        return dataclasses.replace(call, log_decay_BxLxK=log_decay_BxLxK)

    def _columns(self, v_BxLxKxD):
        if not self.signed:
            return v_BxLxKxD
        ones = jnp.ones((*v_BxLxKxD.shape[:-1], 1), jnp.float32)
        return jnp.concatenate([v_BxLxKxD.astype(jnp.float32), ones], axis=-1)

    def _divided(self, call, o_BxLxHxC, dtype):
        if not self.signed:
            has_sums = self.log_factor and not call.options.normalize
            return o_BxLxHxC * math.exp(self.log_factor) if has_sums else o_BxLxHxC
        total = o_BxLxHxC[..., -1:] + self.denominator_bias
        total += 2 * self.epsilon * (jnp.abs(total) <= self.epsilon)
        return quotient(o_BxLxHxC[..., :-1], total).astype(dtype)


def linear_flops_per_token(
    dims: HeadDims, length: int, n_features: int, compared: int, *, block: int | None = None, causal: bool = True
) -> float:
    """Returns the cost of the products of the block engine, without the features.

    The first block has no sums to read. The keys of the last block are added to no sum.

    Args:
        n_features: numbers that each query multiplies with the sums over earlier blocks.
        compared: size of the vectors whose inner products are the weights inside a block.
        causal: False has no blocks.
    """
    reads = 2.0 * n_features * dims.n_heads * (dims.value_size + 1)
    folds = 2.0 * n_features * dims.n_kv_heads * dims.value_size
    if not (causal and dims.causal):
        return reads + folds
    block = min(length, block or DEFAULT_BLOCK)
    folded = (length - 1) // block * block
    inside = dims.n_heads * (compared + dims.value_size) * block
    return inside + (reads * (length - block) + folds * folded) / length
