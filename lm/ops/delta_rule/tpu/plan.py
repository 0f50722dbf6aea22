"""How the kernels of the delta rule cut their arrays."""

import dataclasses
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lm.ops import platform
from lm.ops.delta_rule.types import DeltaCall
from lm.ops.tpu import LANES, padded_rows

CHUNK = LANES
"""Tokens per chunk."""
MOST_HEADS = 12
"""Heads per grid step. Static cycles per token and head on v5e, forward and backward: 16.3 with two, 13.4 with four,
10.5 with twelve."""


class DeltaTokens(NamedTuple):
    """Arrays of L tokens that lie feature by token: N key heads of all sequences, G queries of each.

    Attributes:
        q_MxExL: queries of N G heads.
        k_NxExL: keys.
        v_NxDxL: values.
        beta_Nx1xL: float32.
        c_NxRxL: the running sums of log factors in each chunk, R = 1, float32. In a plan with `channels` they are the
            log factors themselves, R = E.
    """

    q_MxExL: jax.Array
    k_NxExL: jax.Array
    v_NxDxL: jax.Array
    beta_Nx1xL: jax.Array
    c_NxRxL: jax.Array


@dataclasses.dataclass(frozen=True)
class DeltaSizes:
    """The sizes of a call that decide how the kernels cut it.

    Attributes:
        heads: key heads of all sequences.
        groups: queries per key head.
        length: tokens.
        key_rows: rows of keys, padded.
        value_rows: rows of values, padded.
        itemsize: bytes of a number.
        query_length: the `query_length` of the call.
        channels: whether key channels have factors of their own.
    """

    heads: int
    groups: int
    length: int
    key_rows: int
    value_rows: int
    itemsize: int
    query_length: float | None
    channels: bool

    @classmethod
    def of_call(cls, call: DeltaCall) -> 'DeltaSizes':
        batch, length, heads, size = call.k_BxLxKxE.shape
        rows, value_rows = padded_rows(size), padded_rows(call.v_BxLxKxD.shape[-1])
        itemsize = call.v_BxLxKxD.dtype.itemsize
        channels = call.channel_log_decay_BxLxKxE is not None
        return cls(batch * heads, call.groups, length, rows, value_rows, itemsize, call.query_length, channels)


@dataclasses.dataclass(frozen=True)
class DeltaPlan:
    """The part of each array that a grid step sees.

    Attributes:
        heads: key heads per grid step; divides the number of key heads of all sequences.
        groups: queries per key head.
        steps: chunks of a sequence.
        query_length: queries are scaled to this length and keys to length 1; None: neither is scaled.
        channels: whether key channels have factors of their own.
        vmem_limit_bytes: the limit that the compiler gets; None: its default.
    """

    heads: int
    groups: int
    steps: int
    query_length: float | None
    channels: bool
    vmem_limit_bytes: int | None

    @property
    def key_length(self) -> float | None:
        return self.query_length and 1.0

    def specify_tokens(self, tokens: DeltaTokens, backwards: bool = False) -> DeltaTokens:
        """Returns the spec of a chunk of each array."""
        specs = jax.tree.map(lambda x: self._specify(self.heads, x, backwards), tokens)
        return specs._replace(q_MxExL=self.specify_queries(tokens.q_MxExL, backwards))

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

    def estimate_cost(self, rows: int, tokens: DeltaTokens, moved: Any) -> pl.CostEstimate:
        """Estimates the cost of a kernel.

        Args:
            rows: matrix products per chunk and head, counted in rows of `CHUNK` times `CHUNK`.
            tokens: the inputs.
            moved: all arrays that are read or written.
        """
        chunks = tokens.k_NxExL.shape[0] * self.steps
        return pl.CostEstimate(
            flops=2 * chunks * rows * CHUNK**2,
            transcendentals=chunks * CHUNK**2,
            bytes_accessed=sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(moved)),
        )

    def _specify(self, heads: int, array, backwards: bool) -> pl.BlockSpec:
        return pl.BlockSpec((heads, array.shape[1], CHUNK), lambda i, j: (i, 0, self._step(j, backwards)))

    def _step(self, j, backwards: bool):
        return self.steps - 1 - j if backwards else j


def make_plan(sizes: DeltaSizes) -> DeltaPlan:
    """Plans the kernels of a call: as many heads per step as fit and divide the heads of the call."""
    available, limit = platform.vmem()
    fit = max(1, available // estimate_vmem(sizes))
    heads = max(heads for heads in range(1, min(MOST_HEADS, fit) + 1) if sizes.heads % heads == 0)
    return DeltaPlan(heads, sizes.groups, -(-sizes.length // CHUNK), sizes.query_length, sizes.channels, limit)


def estimate_vmem(sizes: DeltaSizes) -> int:
    """Estimates the bytes of VMEM that a head of the backward kernel, the larger one, takes."""
    groups, size, value_size, itemsize = sizes.groups, sizes.key_rows, sizes.value_rows, sizes.itemsize
    blocks = 2 * itemsize * CHUNK * ((1 + groups) * (2 * size + 2 * value_size)) + 2 * itemsize * size * value_size
    states = 4 * 5 * size * value_size
    pairs = (2 + 4 * itemsize + 3 * groups) * 4 * CHUNK**2
    # Per channel: the logs and their gradients, and the levels with their factors and gradients.
    levels = 4 * size * CHUNK * (4 + 3 * (CHUNK.bit_length() - 1)) if sizes.channels else 0
    return blocks + states + pairs + levels
