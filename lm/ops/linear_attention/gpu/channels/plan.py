"""The plan and the arrays of the kernels with a factor per key channel.

Letters: B sequences, L tokens, H query heads, K key heads. Kernels take 64 channels of a key and 64 numbers of a value
at a time: a *part* of a head. A larger head has P pairs of such parts. Outputs of parts of keys add up, and so do
gradients of parts of values. N are all parts of all query heads of all sequences, T chunks of C tokens.

Arrays of tokens have the order in which layers have them, [B, L, H · parts · 64].
"""

import dataclasses
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from lm.ops.dots import in_parts
from lm.ops.gpu import TILE, slice_tile
from lm.ops.linear_attention.gpu.plan import A, Ref

CHUNK = TILE
Logs = TypeVar('Logs')


class ChannelArrays(NamedTuple, Generic[A, Logs]):
    """The tokens of a call, or their gradients; sizes are padded to parts, and the length to chunks.

    Attributes:
        q: queries, bfloat16 [B, L, H E].
        k: keys, bfloat16 [B, L, K E].
        v: values, bfloat16 [B, L, K D].
        logs: logs of the factors, [B, L, K E] float32; in kernels two bfloat16 arrays whose sum they are, to 16 bits.
    """

    q: A
    k: A
    v: A
    logs: Logs


KernelTokens = ChannelArrays[A, list[A]]
"""The tokens of a call as kernels take them."""


def split_logs(tokens: ChannelArrays[jax.Array, jax.Array]) -> KernelTokens[jax.Array]:
    """Returns the arrays that kernels take."""
    return ChannelArrays(tokens.q, tokens.k, tokens.v, in_parts(tokens.logs, 2, in_kernel=False))


@dataclasses.dataclass(frozen=True)
class ChannelPlan:
    """One call of the kernels: the numbers of query and key heads, and of the parts of a key and of a value."""

    heads: int
    key_heads: int
    key_parts: int
    value_parts: int

    @property
    def parts(self) -> int:
        """The pairs of parts of a sequence's heads."""
        return self.heads * self.key_parts * self.value_parts

    def slice_queries(self, array: Ref, number: jax.Array) -> Ref:
        """Returns a part of an array [B, L, H E] as a matrix, [L, 64]; `number` is among N."""
        batch, head, key_part, _ = self._find(number)
        return _slice(array.at[batch], head * self.key_parts + key_part)

    def slice_keys(self, array: Ref, number: jax.Array) -> Ref:
        """Returns a part of an array [B, L, K E]."""
        batch, head, key_part, _ = self._find(number)
        return _slice(array.at[batch], self._find_key_head(head) * self.key_parts + key_part)

    def slice_values(self, array: Ref, number: jax.Array) -> Ref:
        """Returns a part of an array [B, L, K D]."""
        batch, head, _, value_part = self._find(number)
        return _slice(array.at[batch], self._find_key_head(head) * self.value_parts + value_part)

    def slice_outputs(self, array: Ref, number: jax.Array) -> Ref:
        """Returns a part of an array [B, L, H D]."""
        batch, head, _, value_part = self._find(number)
        return _slice(array.at[batch], head * self.value_parts + value_part)

    def slice_key_terms(self, array: Ref, number: jax.Array) -> Ref:
        """Returns a part of an array whose sum over its first axis is wanted, [value parts, B, L, H E]."""
        *_, value_part = self._find(number)
        return self.slice_queries(array.at[value_part], number)

    def slice_output_terms(self, array: Ref, number: jax.Array) -> Ref:
        """Returns a part of an array whose sum over its first axis is wanted, [key parts, B, L, H D]."""
        _, _, key_part, _ = self._find(number)
        return self.slice_outputs(array.at[key_part], number)

    def _find_key_head(self, head: jax.Array) -> jax.Array:
        return lax.div(head, self.heads // self.key_heads)

    def _find(self, number: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Returns the numbers of the sequence, the head, the part of the key and the part of the value."""
        rest, value_part = lax.div(number, self.value_parts), lax.rem(number, self.value_parts)
        rest, key_part = lax.div(rest, self.key_parts), lax.rem(rest, self.key_parts)
        return lax.div(rest, self.heads), lax.rem(rest, self.heads), key_part, value_part


def _slice(array: Ref, column: jax.Array) -> Ref:
    return array.at[:, slice_tile(column)]


def describe_terms(count: int, array: jax.Array, size: int, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    """Returns the type of `count` terms of a sum; `array` has their batch and length."""
    return jax.ShapeDtypeStruct((count, *array.shape[:2], size), dtype)


def add_terms(x: jax.Array) -> jax.Array:
    """Adds the terms of `describe_terms`, in float32; a single term keeps its type."""
    return x[0] if len(x) == 1 else x.astype(jnp.float32).sum(axis=0)
