"""What the GPU kernels of linear attention compute, and in which pieces."""

import dataclasses

TILE = 64
"""Tokens of a thread block, and size of heads: others are padded to it with zeros."""

GROUP = 16
"""Features on either side of a square: `wgmma` contracts 16 at a time."""

SQUARE = GROUP * GROUP
"""Products in a square, and columns of a widest product."""

SLICE = 64
"""Products that are multiplied at a time: four features with the 16 of a group."""


@dataclasses.dataclass(frozen=True)
class GpuPlan:
    """One call of the kernels.

    Attributes:
        block: tokens of a block, a multiple of TILE; inside it the weights are (scale ⟨a, b⟩)^degree, before it
            ⟨x, y⟩².
        exact_local: a and b are arrays of their own; else they are x and y.
        degree: of the weights inside a block, a power of two.
        scale: of the weights inside a block.
        denominator_bias: what the denominator starts from.
        single_block: one block is all there is, so that x ⊗ x has no part in it.
        interpreted: the kernels run in the interpreter, whose `wgmma` takes no operand in registers.
    """

    block: int
    exact_local: bool
    degree: int
    scale: float
    denominator_bias: float
    single_block: bool
    interpreted: bool

    @property
    def tiles(self) -> int:
        """Of a block."""
        return self.block // TILE


def squares(features: int) -> list[tuple[int, int]]:
    """The groups (row, column) of each square of products, none below the diagonal: 3 for 32 features, 10 for 64."""
    return [(row, column) for column in range(features // GROUP) for row in range(column + 1)]
