"""How a sequence is cut into blocks, and what the walk over them carries."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jax import lax

from lm.ops.linear_attention.block import Shape, Sums, no_keys
from lm.ops.linear_attention.types import Options


@dataclasses.dataclass(frozen=True)
class BlockPlan:
    """The static side of a call."""

    options: Options
    length: int
    block: int
    tile: int
    heads: int
    features: int
    values: int
    dtype: Any
    before: bool
    """Whether there are sums over keys before the first block."""
    after: bool
    """Whether the sums over all keys are wanted."""

    @property
    def lag(self) -> int:
        return self.options.window or 0

    @property
    def folds(self) -> bool:
        """Whether any block folds its keys into the sums."""
        return self.after or self.length > self.block or not self.options.causal

    @property
    def reuses(self) -> bool:
        """Whether a block's keys are compared and folded by their features, which then are formed once for both."""
        return self.options.causal and self.folds and self.shape.compares

    @property
    def shape(self) -> Shape:
        """What a block has to do."""
        reads = self.before or self.length > self.block or not self.options.causal
        return Shape(self.options, self.tile, reads, self.dtype)

    def no_keys(self, batch: int) -> Sums | None:
        """The sums over no keys, where any are needed."""
        if not (self.folds or self.shape.reads):
            return None
        return no_keys(self.options, batch, self.heads, self.features, self.values)

    def walk(self, body: Callable[[Any, int, Any], Any], carry: Any, reverse: bool = False) -> Any:
        """body(start, size, carry) for each block in order."""
        whole, rest = divmod(self.length, self.block)

        def tail(carry):
            return body(whole * self.block, rest, carry) if rest else carry

        def index(i):
            return (whole - 1 - i if reverse else i) * self.block

        carry = tail(carry) if reverse else carry
        if whole == 1:
            carry = body(0, self.block, carry)
        elif whole:
            carry = lax.fori_loop(0, whole, lambda i, c: body(index(i), self.block, c), carry)
        return carry if reverse else tail(carry)
