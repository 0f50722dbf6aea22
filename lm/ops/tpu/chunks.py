"""How kernels that walk over a sequence chunk by chunk cut their arrays."""

import dataclasses
from typing import NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lm.ops.tpu import LANES
from lm.ops.tpu.decay import LogSums

CHUNK = LANES
"""Tokens per chunk."""
MOST_HEADS = 12
"""Heads per grid step. Static cycles per token and head of the delta rule on v5e, forward and backward: 16.3 with two,
13.4 with four, 10.5 with twelve."""


class WalkedTokens(NamedTuple):
    """Arrays of L tokens that lie feature by token: N key heads of all sequences, G queries of each.

    Attributes:
        q_MxExL: queries of N G heads.
        k_NxExL: keys.
        v_NxDxL: values.
        beta_Nx1xL: β of the delta rule, float32; None for linear attention.
        log_NxRxL: the logs of the factors of key channels, R = E; or the running sums of a head's log factors in each
            chunk, R = 1. float32.
        rest_Nx1xL: the rest that the rounding of running sums has left; None in bfloat16, and without running sums.
    """

    q_MxExL: jax.Array
    k_NxExL: jax.Array
    v_NxDxL: jax.Array
    beta_Nx1xL: jax.Array | None
    log_NxRxL: jax.Array
    rest_Nx1xL: jax.Array | None = None

    def sums(self, head: int) -> LogSums:
        """Returns the running sums of a head as rows, inside a kernel."""
        return LogSums(self.log_NxRxL[head], None if self.rest_Nx1xL is None else self.rest_Nx1xL[head])


def count_heads(total: int, most: int) -> int:
    """Returns the largest divisor of the heads of a call that is at most `most` and `MOST_HEADS`, at least 1."""
    return max(heads for heads in range(1, max(1, min(MOST_HEADS, most)) + 1) if total % heads == 0)


def count_packed(heads: int, size: int) -> int:
    """Returns how many of the heads of a grid step, with keys of this size, fit side by side on the lanes."""
    return max(n for n in range(1, heads + 1) if n == 1 or (n * size <= LANES and heads % n == 0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkPlan:
    """The part of each array that a grid step sees: a chunk of some heads.

    Attributes:
        heads: key heads per grid step; divides the number of key heads of all sequences.
        groups: queries per key head.
        steps: chunks of a sequence.
        vmem_limit_bytes: the limit that the compiler gets; None: its default.
        pack: heads whose states lie side by side on the lanes; divides `heads`.
    """

    heads: int
    groups: int
    steps: int
    vmem_limit_bytes: int | None
    pack: int = 1

    @property
    def keeps_inverses(self) -> bool:
        """Tells whether the forward kernel saves the inverse [C, C] of the system of each chunk and head."""
        return False

    @property
    def packs(self) -> list[range]:
        """The heads of each pack of a grid step."""
        return [range(at, at + self.pack) for at in range(0, self.heads, self.pack)]

    def pack_states(self, states_NxDxE: jax.Array) -> jax.Array:
        """Returns [N / P, D, P E] for packs of P heads."""
        heads, rows, size = states_NxDxE.shape
        states_MxPxDxE = states_NxDxE.reshape(heads // self.pack, self.pack, rows, size)
        return states_MxPxDxE.swapaxes(1, 2).reshape(-1, rows, self.pack * size)

    def unpack_states(self, states_MxDxE: jax.Array) -> jax.Array:
        """Undoes `pack_states`."""
        packs, rows, width = states_MxDxE.shape
        states_MxDxPxE = states_MxDxE.reshape(packs, rows, self.pack, width // self.pack)
        return states_MxDxPxE.swapaxes(1, 2).reshape(-1, rows, width // self.pack)

    def specify_tokens(self, tokens: WalkedTokens, backwards: bool = False) -> WalkedTokens:
        """Returns the spec of a chunk of each array."""

        def specify(x: jax.Array) -> pl.BlockSpec:
            return self._specify(self.heads * (self.groups if x is tokens.q_MxExL else 1), x, backwards)

        return jax.tree.map(specify, tokens)

    def specify_queries(self, array, backwards: bool = False) -> pl.BlockSpec:
        """Returns the spec of a chunk of [N G, rows, L]."""
        return self._specify(self.heads * self.groups, array, backwards)

    def specify_states(self, array, backwards: bool = False) -> pl.BlockSpec:
        """Returns the spec of the state before a chunk, of [N, L / C, D, E] for packs of one head."""
        return self._specify_chunks(self.heads // self.pack, array, backwards)

    def specify_inverses(self, array, backwards: bool = False) -> pl.BlockSpec:
        """Returns the spec of the inverses of a chunk, of [N, L / C, C, C]."""
        return self._specify_chunks(self.heads, array, backwards)

    def specify_whole(self, array) -> pl.BlockSpec:
        """Returns the spec of [N, D, E] for packs of one head, the same for all chunks."""
        return pl.BlockSpec((self.heads // self.pack, *array.shape[1:]), lambda i, j: (i, 0, 0))

    @property
    def compiler_params(self) -> pltpu.CompilerParams:
        return pltpu.CompilerParams(
            dimension_semantics=('parallel', 'arbitrary'), vmem_limit_bytes=self.vmem_limit_bytes
        )

    def estimate_cost(self, rows: int, heads: int, moved: object) -> pl.CostEstimate:
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

    def _specify_chunks(self, heads: int, array, backwards: bool) -> pl.BlockSpec:
        return pl.BlockSpec((heads, 1, *array.shape[2:]), lambda i, j: (i, self._step(j, backwards), 0, 0))

    def _step(self, j, backwards: bool):
        return self.steps - 1 - j if backwards else j
