"""How the kernels of the sketch networks are cut into steps."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class NodePlan:
    """How the kernels are cut into steps.

    Attributes:
        block: tokens per grid step.
        tile: tokens at a time in the backward kernel; a block has an even number of them.
        forward_tile: tokens at a time in the forward kernel.
        heads: heads that share a sketch (G).
        parts: runs of blocks, each with its own sums of weight gradients, for chips with two cores.
        rows: hidden units at a time in the backward kernel.
        narrow: whether hidden units are computed in bfloat16, for chips whose vector units can.
        vmem_limit_bytes: memory that the compiler may use; None: its default.
    """

    block: int
    tile: int
    forward_tile: int
    heads: int
    parts: int
    rows: int
    narrow: bool = False
    vmem_limit_bytes: int | None = None
