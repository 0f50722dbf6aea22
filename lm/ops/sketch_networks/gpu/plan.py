"""How the GPU kernels of the sketch networks are cut into pieces."""

import dataclasses
import math

TILE = 64
"""Vectors of a warpgroup: the rows of a `wgmma` product."""

CHUNK = 64
"""Hidden units at a time."""

SLOTS = 4
"""Chunks of the maps in shared memory."""

SHARED_MEMORY = 224 * 2**10
"""Bytes a thread block may have for matrices and biases: 227 KiB without barriers and sums over warps."""

WARPGROUPS = {32: (4, 4), 64: (4, 3)}
"""By the numbers of a sketch: for how many warpgroups there are registers in the forward and the backward kernel."""


@dataclasses.dataclass(frozen=True)
class GpuNodePlan:
    """One node of the tree.

    Attributes:
        forward_warpgroups: warpgroups of a thread block of the forward kernel; each has a tile of vectors.
        backward_warpgroups: warpgroups of a thread block of the kernel that computes the inputs' gradients.
        split: tiles whose gradients of the weights are added up by one thread block.
    """

    forward_warpgroups: int
    backward_warpgroups: int
    split: int

    @property
    def grain(self) -> int:
        """The number of vectors is a multiple of this."""
        return TILE * math.lcm(self.forward_warpgroups, self.backward_warpgroups)


def warpgroups(size: int, r: int, hidden: int, nodes: int) -> tuple[int, int]:
    """Returns how many fit a thread block, forward and backward, for vectors of `size` and so many nodes; 0: none."""
    inputs = max(size, 2 * r if nodes > 1 else 0)
    streamed = 2 * SLOTS * CHUNK * (max(size, r) + 2 * r) + 16 * hidden
    # Forward a tile of inputs and one of what is between the levels; backward two of these and two of gradients.
    tiles = 2 * TILE * (inputs + r), 2 * TILE * (inputs + 4 * r)
    fitting = [(SHARED_MEMORY - streamed) // tile for tile in tiles]
    forward, backward = (max(0, min(pair)) for pair in zip(fitting, WARPGROUPS[r], strict=True))
    return forward, backward
