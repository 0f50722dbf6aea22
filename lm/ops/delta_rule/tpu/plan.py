"""How the kernels of the delta rule cut their arrays."""

import dataclasses

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lm.ops import platform
from lm.ops.tpu import LANES

CHUNK = LANES
"""Tokens."""
MOST_HEADS = 12
"""Of a grid step. Static cycles a token and head on v5e, forward and backward: 16.3 with two, 13.4 with four, 10.5 with
twelve."""


@dataclasses.dataclass(frozen=True)
class DeltaPlan:
    """Which part of each array a grid step sees.

    Attributes:
        heads: key heads of a grid step; divides those of all sequences.
        groups: queries of a key head.
        steps: chunks of a sequence.
        query_length: queries are brought to this length and keys to length 1; None: both are as they are.
        vmem_limit_bytes: to ask the compiler for; None: its default.
    """

    heads: int
    groups: int
    steps: int
    query_length: float | None
    vmem_limit_bytes: int | None

    def keys(self, array, backwards: bool = False) -> pl.BlockSpec:
        """Of [N, rows, L], the tokens of a chunk."""
        return pl.BlockSpec((self.heads, array.shape[1], CHUNK), lambda i, j: (i, 0, self._step(j, backwards)))

    def queries(self, array, backwards: bool = False) -> pl.BlockSpec:
        """Of [N G, rows, L], likewise."""
        block = self.heads * self.groups, array.shape[1], CHUNK
        return pl.BlockSpec(block, lambda i, j: (i, 0, self._step(j, backwards)))

    def state(self, array, backwards: bool = False) -> pl.BlockSpec:
        """Of the states before each chunk, [N, L / C, D, E]."""
        block = self.heads, 1, *array.shape[2:]
        return pl.BlockSpec(block, lambda i, j: (i, self._step(j, backwards), 0, 0))

    def whole(self, array) -> pl.BlockSpec:
        """Of [N, D, E], the same for all chunks."""
        return pl.BlockSpec((self.heads, *array.shape[1:]), lambda i, j: (i, 0, 0))

    @property
    def compiler_params(self) -> pltpu.CompilerParams:
        return pltpu.CompilerParams(
            dimension_semantics=('parallel', 'arbitrary'), vmem_limit_bytes=self.vmem_limit_bytes
        )

    def cost(self, rows: int, inputs, outputs) -> pl.CostEstimate:
        """`rows`: products of matrices that a chunk of a head takes, as rows of `CHUNK` times `CHUNK`."""
        chunks = inputs[0].shape[0] // self.groups * self.steps
        return pl.CostEstimate(
            flops=2 * chunks * rows * CHUNK**2,
            transcendentals=chunks * CHUNK**2,
            bytes_accessed=sum(a.size * a.dtype.itemsize for a in (*inputs, *outputs)),
        )

    def _step(self, j, backwards):
        return self.steps - 1 - j if backwards else j


def plan_for(
    n: int, groups: int, length: int, size: int, value_size: int, itemsize: int, query_length: float | None = None
) -> DeltaPlan:
    """How `n` key heads of `length` tokens are computed, of which `size` and `value_size` rows are padded."""
    available, limit = platform.vmem()
    fit = max(1, available // vmem_estimate(groups, size, value_size, itemsize))
    heads = max(heads for heads in range(1, min(MOST_HEADS, fit) + 1) if n % heads == 0)
    return DeltaPlan(heads, groups, -(-length // CHUNK), query_length, limit)


def vmem_estimate(groups: int, size: int, value_size: int, itemsize: int) -> int:
    """Bytes of VMEM that a head of the backward kernel, the larger one, takes."""
    blocks = 2 * itemsize * CHUNK * ((1 + groups) * (2 * size + 2 * value_size)) + 2 * itemsize * size * value_size
    states = 4 * 5 * size * value_size
    pairs = (2 + 4 * itemsize + 3 * groups) * 4 * CHUNK**2
    return blocks + states + pairs
