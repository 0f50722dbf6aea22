"""How the kernels of the delta rule cut their arrays."""

import dataclasses

from lm.ops import platform
from lm.ops.delta_rule.types import DeltaCall
from lm.ops.tpu import LANES
from lm.ops.tpu.chunk_sizes import ChunkSizes, cut
from lm.ops.tpu.chunks import ChunkPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaPlan(ChunkPlan):
    """The part of each array that a grid step sees.

    Attributes:
        query_length: queries are scaled to this length and keys to length 1; None: neither is scaled.
        channels: whether key channels have factors of their own.
        staggered: whether the packs of a backward step begin one after the other, in a plan with `channels`.
    """

    query_length: float | None
    channels: bool
    staggered: bool

    @property
    def key_length(self) -> float | None:
        return self.query_length and 1.0

    @property
    def keeps_inverses(self) -> bool:
        return True


def make_plan(call: DeltaCall) -> DeltaPlan:
    """Plans the kernels of a call."""
    # Pays where matrix units are the busier ones, on v5e and v5p. On v4 and v6e numbers that live longer cost more.
    staggered = platform.matrix_side() == LANES and not platform.rotates_by_steps()
    channels = call.channel_log_decay_BxLxKxE is not None
    options = {'query_length': call.query_length, 'channels': channels, 'staggered': staggered}
    return cut(DeltaPlan, ChunkSizes.measure(call), estimate_vmem(call), pack=channels, **options)


def estimate_vmem(call: DeltaCall) -> int:
    """Estimates the bytes of VMEM that a head of the backward kernel, the larger one, takes."""
    sizes = ChunkSizes.measure(call)
    channels = call.channel_log_decay_BxLxKxE is not None
    kept = sizes.itemsize // 2  # an inverse, twice: while one is read, the next one comes
    return sizes.estimate_vmem(2 + 4 * sizes.itemsize + 3 * sizes.groups + kept, channels)
