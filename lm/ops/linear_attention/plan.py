"""The blocks of a sequence, and the walk over them."""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from lm.ops.linear_attention.block import Shape, Sums, make_empty
from lm.ops.linear_attention.types import Options

Carry = TypeVar('Carry')


@dataclasses.dataclass(frozen=True)
class BlockPlan:
    """The static properties of a call.

    Attributes:
        block: tokens per block.
        tile: rows of queries at a time.
        heads: key heads.
        groups: queries per key head.
        features: features of a key.
        values: size of a value.
        dtype: the type of the values.
        before: True where there are sums over keys before the first block.
        after: True where the caller requests the sums over all keys.
    """

    options: Options
    length: int
    block: int
    tile: int
    heads: int
    groups: int
    features: int
    values: int
    dtype: jnp.dtype
    before: bool
    after: bool

    @property
    def lag(self) -> int:
        return self.options.window or 0

    @property
    def folds(self) -> bool:
        """True where any block folds its keys into the sums."""
        return self.after or self.length > self.block or not self.options.causal

    @property
    def reuses(self) -> bool:
        """True where features of a block's keys are compared and folded: they are formed once for both."""
        return self.options.causal and self.folds and self.shape.compares

    @property
    def shape(self) -> Shape:
        """The static properties of a block."""
        reads = self.before or self.length > self.block or not self.options.causal
        return Shape(self.options, self.tile, reads, self.dtype)

    def make_empty(self, batch: int) -> Sums | None:
        """Makes the sums over no keys; None where no sums are needed."""
        if not (self.folds or self.shape.reads):
            return None
        return make_empty(self.options, batch, self.heads, self.features, self.values)

    def walk(self, body: Callable[[jax.Array | int, int, Carry], Carry], carry: Carry, reverse: bool = False) -> Carry:
        """Applies body(start, size, carry) to each block in order.

        Where the block does not divide the length, the last block is shorter.
        """
        whole, rest = divmod(self.length, self.block)

        def walk_rest(carry: Carry) -> Carry:
            return body(whole * self.block, rest, carry) if rest else carry

        def find_start(i):
            return (whole - 1 - i if reverse else i) * self.block

        carry = walk_rest(carry) if reverse else carry
        if whole == 1:
            carry = body(0, self.block, carry)
        elif whole:
            carry = lax.fori_loop(0, whole, lambda i, c: body(find_start(i), self.block, c), carry)
        return carry if reverse else walk_rest(carry)
