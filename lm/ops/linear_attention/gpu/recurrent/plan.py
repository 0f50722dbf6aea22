"""The plan and the arrays of the recurrent GPU kernels.

Letters: N heads of all sequences (of all segments, where there are several), L tokens, M features. E is the size of the
vectors that a feature map takes, D the head size, and S the number of slices.
"""

import dataclasses
from typing import Any, Generic, NamedTuple, TypeVar

from lm.ops.linear_attention.types import ElementwiseMap

CHUNK = 64
"""Features that stand side by side in memory; sums over keys are kept for so many at a time."""

SLOTS = 2
"""Tiles in shared memory: one to come, and one in use. A multiprocessor then has room for two thread blocks."""

Ref = Any
"""A reference to an array in memory, inside a kernel."""
A = TypeVar('A')
"""jax.Array, or inside a kernel `Ref`."""


class SideArrays(NamedTuple, Generic[A]):
    """The features of queries or keys, or the arrays from which kernels make them.

    Attributes:
        features: given features in chunks, [N, M / 64, L, 64]; None where kernels make them.
        vectors: inputs of the feature map, [N, L, E]; None without one.
        shifts: shifts of the feature map, float32 [N, L]; None without one.
    """

    features: A | None = None
    vectors: A | None = None
    shifts: A | None = None


class MapRows(NamedTuple, Generic[A]):
    """Rows w of a feature map that queries and keys share, [M / 64, 64, E] bfloat16: w to 8 bits, and the remainder."""

    high: A
    low: A


class SegmentSums(NamedTuple, Generic[A]):
    """Sums over the tokens before each segment, after it, or in it, float32.

    Attributes:
        state: Σ y vᵀ, [N, M / 64, 64, D].
        totals: Σ y, [N, M / 64, 64]; None without denominators.
    """

    state: A
    totals: A | None


@dataclasses.dataclass(frozen=True)
class RecurrentPlan:
    """One call of the kernels.

    Attributes:
        segments: segments of a sequence, each with separate thread blocks.
        slices: thread blocks per segment of a head, each with its features.
        chunks: chunks of `CHUNK` features per slice.
        normalize: True where there are denominators.
        decay: True where there are log factors.
        feature_map: makes features of the vectors in memory; None: the arrays are features.
        interpreted: the kernels run in the interpreter, whose `wgmma` takes no operand in registers.
    """

    segments: int
    slices: int
    chunks: int
    normalize: bool
    decay: bool
    feature_map: ElementwiseMap | None
    interpreted: bool

    @property
    def carried(self) -> bool:
        """True where the walks carry their sums; else the accumulators of products hold them from tile to tile.

        Only products change an accumulator, which starts from 0.
        """
        return self.decay or self.segments > 1
