"""The plan and the arrays of the recurrent GPU kernels.

Letters: B sequences, L tokens, M features. N are all segments of all heads of all sequences, of T = L / segments tokens
each. E is the size of the vectors that a feature map takes, D the head size, both 64, and S the number of slices.

Matrices have the order in which layers have them: tokens, then heads, [B, L, K E]. `slice_head` finds the part of a
thread block. Keys and values may have fewer heads than queries. Numbers per token are small, and ordered by head.
"""

import dataclasses
from typing import Generic, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from lm.ops.gpu import slice_head
from lm.ops.linear_attention.feature_maps import ElementwiseMap
from lm.ops.linear_attention.gpu.plan import A, Ref

CHUNK = 64
"""Features that stand side by side in memory; sums over keys are kept for so many at a time."""

SLOTS = 2
"""Tiles in shared memory: one to come, and one in use. A multiprocessor then has room for two thread blocks."""


class SideArrays(NamedTuple, Generic[A]):
    """The features of queries or keys, or the arrays from which kernels make them, or a tile of them in shared memory.

    Gradients of these arrays have the same form, with the last two (`results`).

    Attributes:
        features: given features, [B, L, K M]; inside a kernel a list of its chunks. None where kernels make them.
        vectors: inputs of the feature map, [B, L, K E]; None without one.
        shifts: shifts of the feature map, float32 [N, T]; None without one.
        decay: ⟨φ, dφ⟩; None without decay.
        values: the gradients of values; None for queries.
    """

    features: A | None = None
    vectors: A | None = None
    shifts: A | None = None
    decay: A | None = None
    values: A | None = None


class SegmentSums(NamedTuple, Generic[A]):
    """Sums over the tokens before each segment, after it, or in it, float32; in a walk lists of the sums of its chunks.

    Attributes:
        state: Σ y vᵀ, [N, M / 64, 64, D]; in a walk an empty list where accumulators hold it.
        totals: Σ y, [N, M / 64, 64]; None without denominators.
    """

    state: A
    totals: A | None


class RecurrentArrays(NamedTuple, Generic[A]):
    """The arrays of a kernel, or a tile of them in shared memory.

    Attributes:
        own: features of the side that a kernel computes for: of queries, or of keys.
        other: features of the other side; None for a kernel that needs none.
        rows: rows w of a feature map that both sides share, [M / 64, 64, E] bfloat16 each: w to 8 bits, and the
            remainder. None without a map.
        v: values, [B, L, K D] bfloat16; for sums over queries their g.
        g: gradients of numerators, [B, L, H D].
        e: gradients of denominators, [N, T] float32; None without denominators.
        t: running sums of log factors in each tile, [N, T] float32; None without decay.
        sums: the sums before each segment, or after it; None with a single segment.
    """

    own: SideArrays[A]
    other: SideArrays[A] | None
    rows: list[A] | None
    v: A
    g: A | None = None
    e: A | None = None
    t: A | None = None
    sums: SegmentSums[A] | None = None


@dataclasses.dataclass(frozen=True)
class RecurrentPlan:
    """One call of the kernels.

    Attributes:
        heads: heads of queries.
        segments: segments of a sequence, each with separate thread blocks.
        slices: thread blocks per segment of a head, each with its features.
        chunks: chunks of `CHUNK` features per slice.
        normalize: True where there are denominators.
        denominator_bias: added to denominators.
        decay: True where there are log factors.
        feature_map: makes features of the vectors in memory; None: the arrays are features.
    """

    heads: int
    segments: int
    slices: int
    chunks: int
    normalize: bool
    denominator_bias: float
    decay: bool
    feature_map: ElementwiseMap | None

    @property
    def carried(self) -> bool:
        """True where the walks carry their sums; else the accumulators of products hold them from tile to tile.

        Only products change an accumulator, which starts from 0.
        """
        return self.decay or self.segments > 1

    @property
    def part_type(self) -> DTypeLike:
        """The type of what a slice adds to outputs and gradients; bfloat16 where one slice has all features."""
        return jnp.bfloat16 if self.slices == 1 else jnp.float32

    def slice_head(self, array: Ref, c: int | None = None) -> Ref:
        """Returns the tokens of the thread block's head and segment as a matrix in memory, [T, 64].

        `c` is the chunk of its slice where `array` holds features.
        """
        number = lax.axis_index('head')
        if c is None:
            return slice_head(array, number, self.heads, self.segments)
        chunk = lax.axis_index('slice') * self.chunks + c
        return slice_head(array, number, self.heads, self.segments, chunk, self.slices * self.chunks)

    def slice_part(self, array: Ref) -> Ref:
        """Returns the part of the thread block's slice, a matrix as of `slice_head`, of an array [S, B, L, H D]."""
        return self.slice_head(array.at[lax.axis_index('slice')])
