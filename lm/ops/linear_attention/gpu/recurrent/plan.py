"""What the recurrent GPU kernels compute, in which pieces, and of which arrays.

N heads of all sequences (of all segments, where there are several), L tokens, M features, E size of the vectors that a
feature map takes, D head size, S slices.
"""

import dataclasses
from typing import Any, Generic, NamedTuple, TypeVar

from lm.ops.linear_attention.types import ElementwiseMap

CHUNK = 64
"""Features that stand side by side in memory; sums over keys are kept for so many at a time."""

SLOTS = 2
"""Tiles in shared memory: one to come, and one in use. A processor then has room for two thread blocks."""

Ref = Any
"""A reference to an array in memory, inside of a kernel."""
A = TypeVar('A')
"""jax.Array, or inside of a kernel `Ref`."""


class SideArrays(NamedTuple, Generic[A]):
    """The features of queries or keys, or what kernels make them of.

    Attributes:
        features: given features in chunks, [N, M / 64, L, 64]; None where kernels make them.
        vectors: inputs of the feature map, [N, L, E]; None without one.
        shifts: its shifts, float32 [N, L]; None without one.
    """

    features: A | None = None
    vectors: A | None = None
    shifts: A | None = None


class MapRows(NamedTuple, Generic[A]):
    """The rows w of a feature map that queries and keys share, [M / 64, 64, E] bfloat16: w to 8 bits, and the rest."""

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
        segments: in which a sequence is cut, each with separate thread blocks.
        slices: thread blocks per segment of a head, each with its features.
        chunks: CHUNKs of a slice.
        normalize: whether there are denominators.
        decay: whether there are log factors.
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
        """Whether the walks carry their sums; else the accumulators of products hold them from tile to tile.

        Nothing but a product changes an accumulator, which starts from 0.
        """
        return self.decay or self.segments > 1
