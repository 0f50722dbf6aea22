"""How kernels that walk over a sequence chunk by chunk cut their arrays."""

import dataclasses
from typing import Any, NamedTuple, TypeVar

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lm.ops.tpu import LANES

CHUNK = LANES
"""Tokens per chunk."""
MOST_HEADS = 12
"""Heads per grid step. Static cycles per token and head of the delta rule on v5e, forward and backward: 16.3 with two,
13.4 with four, 10.5 with twelve."""

Tokens = TypeVar('Tokens', bound=NamedTuple)
"""Arrays of L tokens that lie feature by token, of N key heads of all sequences; `q_MxExL` has G queries of each."""


def count_heads(total: int, most: int) -> int:
    """Returns the largest divisor of the heads of a call that is at most `most` and `MOST_HEADS`, at least 1."""
    return max(heads for heads in range(1, max(1, min(MOST_HEADS, most)) + 1) if total % heads == 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkPlan:
    """The part of each array that a grid step sees: a chunk of some heads.

    Attributes:
        heads: key heads per grid step; divides the number of key heads of all sequences.
        groups: queries per key head.
        steps: chunks of a sequence.
        vmem_limit_bytes: the limit that the compiler gets; None: its default.
    """

    heads: int
    groups: int
    steps: int
    vmem_limit_bytes: int | None

    def specify_tokens(self, tokens: Tokens, backwards: bool = False) -> Tokens:
        """Returns the spec of a chunk of each array."""
        given: Any = tokens
        specs = jax.tree.map(lambda x: self._specify(self.heads, x, backwards), given)
        return specs._replace(q_MxExL=self.specify_queries(given.q_MxExL, backwards))

    def specify_queries(self, array, backwards: bool = False) -> pl.BlockSpec:
        """Returns the spec of a chunk of [N G, rows, L]."""
        return self._specify(self.heads * self.groups, array, backwards)

    def specify_states(self, array, backwards: bool = False) -> pl.BlockSpec:
        """Returns the spec of the state before a chunk, of [N, L / C, D, E]."""
        block = self.heads, 1, *array.shape[2:]
        return pl.BlockSpec(block, lambda i, j: (i, self._step(j, backwards), 0, 0))

    def specify_whole(self, array) -> pl.BlockSpec:
        """Returns the spec of [N, D, E], the same for all chunks."""
        return pl.BlockSpec((self.heads, *array.shape[1:]), lambda i, j: (i, 0, 0))

    @property
    def compiler_params(self) -> pltpu.CompilerParams:
        return pltpu.CompilerParams(
            dimension_semantics=('parallel', 'arbitrary'), vmem_limit_bytes=self.vmem_limit_bytes
        )

    def estimate_cost(self, rows: int, heads: int, moved: Any) -> pl.CostEstimate:
        """Estimates the cost of a kernel.

        Args:
            rows: matrix products per chunk and head, counted in rows of `CHUNK` times `CHUNK`.
            heads: key heads of all sequences.
            moved: all arrays that are read or written.
        """
        chunks = heads * self.steps
        return pl.CostEstimate(
            flops=2 * chunks * rows * CHUNK**2,
            transcendentals=chunks * CHUNK**2,
            bytes_accessed=sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(moved)),
        )

    def _specify(self, heads: int, array, backwards: bool) -> pl.BlockSpec:
        return pl.BlockSpec((heads, array.shape[1], CHUNK), lambda i, j: (i, 0, self._step(j, backwards)))

    def _step(self, j, backwards: bool):
        return self.steps - 1 - j if backwards else j
