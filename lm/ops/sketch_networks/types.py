"""The call of the sketch networks, as all implementations take it, its weights and its results.

B batch, L length, N sketches of G heads each, M vector size, E hidden units, r (R in names) sketch size.
"""

from typing import Annotated, Generic, NamedTuple, TypeVar

import jax

Each = TypeVar('Each')


class ByLevel(NamedTuple, Generic[Each]):
    """A value for each level of a network: LayerNorm, M → E, gelu, → r is the lower one. An index is a level, too."""

    lower: Each
    upper: Each


class LevelWeights(NamedTuple):
    """The parameters of one level of a network, for each of N sketches; for the upper level, M stands for r."""

    scale_Nx1xM: jax.Array
    bias_Nx1xM: jax.Array
    wide_NxMxE: jax.Array
    narrow_NxExR: jax.Array


NetworkWeights = ByLevel[LevelWeights]
"""The parameters of one small network."""


class Node(NamedTuple):
    """The two networks of a node of the tree: of its left and its right child."""

    first: NetworkWeights
    second: NetworkWeights


Nodes = tuple[Node, ...]
"""The nodes of the tree: those above the leaves first, the root last."""


class SketchSizes(NamedTuple):
    """The sizes of a node: N sketches, vectors of M numbers, E hidden units, r numbers of a sketch."""

    n: int
    size: int
    hidden: int
    r: int

    @classmethod
    def measure(cls, nodes: Nodes) -> 'SketchSizes':
        """Returns the sizes of the nodes above the leaves."""
        n, size, hidden = nodes[0].first.lower.wide_NxMxE.shape
        return cls(n, size, hidden, nodes[0].first.upper.narrow_NxExR.shape[-1])


class SketchCall(NamedTuple):
    """The arguments of `lm.ops.sketch_networks.sketch_networks`."""

    nodes: Nodes
    xs_BxLxNxGxM: tuple[jax.Array, ...]

    @property
    def sizes(self) -> SketchSizes:
        """The sizes of the nodes above the leaves."""
        return SketchSizes.measure(self.nodes)


class Sketched(NamedTuple):
    """The sketches of arrays of vectors.

    Attributes:
        sketches: of each array, [B, L, N, G, r].
        vectors: the arrays as they were passed. What reads them from here gets its gradient added to the gradient of
            the networks where that is formed, which on TPUs is on chip.
    """

    sketches: Annotated[tuple[jax.Array, ...], 'BxLxNxGxR']
    vectors: Annotated[tuple[jax.Array, ...], 'BxLxNxGxM']
