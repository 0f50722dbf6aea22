"""What the recurrent GPU kernels compute, and in which pieces."""

import dataclasses

from lm.ops.linear_attention.types import ElementwiseMap

CHUNK = 64
"""Features that stand side by side in memory; sums over keys are kept for so many at a time."""

SLOTS = 2
"""Tiles in shared memory: one to come, and one in use. A processor then has room for two thread blocks."""


@dataclasses.dataclass(frozen=True)
class RecurrentPlan:
    """One call of the kernels.

    Attributes:
        segments: in which a sequence is cut, each with thread blocks of its own.
        slices: thread blocks a segment of a head, each with its features.
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
