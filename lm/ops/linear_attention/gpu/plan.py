"""The plan and the arrays of the GPU kernels of linear attention."""

import dataclasses
from typing import Any, Generic, NamedTuple, TypeVar

import jax

Ref = Any
"""A reference to an array in memory, inside a kernel."""
A = TypeVar('A')
"""jax.Array, or inside a kernel `Ref`."""

TILE = 64
"""Tokens per thread block, and size of heads: smaller heads are padded to it with zeros."""

GROUP = 16
"""Features on either side of a square: `wgmma` contracts 16 at a time."""

SQUARE = GROUP * GROUP
"""Products in a square, and columns of a widest product."""

SLICE = 64
"""Products that are multiplied at a time: four features with the 16 of a group."""


class SquareInputs(NamedTuple):
    """The arrays of a call with separate heads. R and C are 32 or 64, D is TILE, L a multiple of plan.block.

    Attributes:
        x_NxLxR: features of queries.
        y_NxLxR: features of keys.
        a_NxLxC: the queries that the exact kernel compares; None unless plan.exact_local.
        b_NxLxC: the keys that the exact kernel compares; None unless plan.exact_local.
    """

    x_NxLxR: jax.Array
    y_NxLxR: jax.Array
    v_NxLxD: jax.Array
    a_NxLxC: jax.Array | None = None
    b_NxLxC: jax.Array | None = None

    @property
    def queries(self) -> jax.Array:
        """The vectors of queries that weights inside a block compare."""
        return self.x_NxLxR if self.a_NxLxC is None else self.a_NxLxC

    @property
    def keys(self) -> jax.Array:
        """The vectors of keys that weights inside a block compare."""
        return self.y_NxLxR if self.b_NxLxC is None else self.b_NxLxC


class NearTokens(NamedTuple, Generic[A]):
    """The operands of weights inside a block; the side whose results a kernel computes comes first.

    Attributes:
        own_NxLxC: the compared vectors of this side.
        other_NxLxC: the compared vectors of the other side.
        g_NxLxD: gradients of numerators, bfloat16; None in the forward pass.
        e_NxL: gradients of denominators, float32; None in the forward pass.
    """

    own_NxLxC: A
    other_NxLxC: A
    v_NxLxD: A
    g_NxLxD: A | None = None
    e_NxL: A | None = None


class FarTokens(NamedTuple, Generic[A]):
    """Tokens that meet the sums over the tokens of other blocks.

    Attributes:
        x_NxLxR: features of the tokens.
        xt_NxRxL: x transposed.
        moment: Σ y yᵀ, bfloat16 [N, L / block, 3R, R]: three parts, stacked.
        state: Σ (y ⊗ y) vᵀ, bfloat16 [N, L / block, 2M, S / 2, D]: square by square, each cut in two. Gradients also
            need the mirror images of the squares, column by column.
    """

    x_NxLxR: A
    xt_NxRxL: A
    moment: A
    state: A


@dataclasses.dataclass(frozen=True)
class GpuPlan:
    """One call of the kernels.

    Attributes:
        block: tokens of a block, a multiple of TILE; inside it the weights are (scale ⟨a, b⟩)^degree, before it
            ⟨x, y⟩².
        exact_local: a and b are arrays of their own; else they are x and y.
        degree: the degree of the weights inside a block, a power of two.
        single_block: the sequence is one block, so that x ⊗ x has no part in it.
    """

    block: int
    exact_local: bool
    degree: int
    scale: float
    denominator_bias: float
    single_block: bool

    @property
    def tiles(self) -> int:
        """The number of a block's tiles."""
        return self.block // TILE


def list_squares(features: int) -> list[tuple[int, int]]:
    """Lists the groups (row, column) of the squares of products, none below the diagonal: 3 for R = 32, 10 for 64."""
    return [(row, column) for column in range(features // GROUP) for row in range(column + 1)]
