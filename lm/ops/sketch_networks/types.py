"""What the implementations of the sketch networks share."""

from collections.abc import Callable
from typing import NamedTuple

import jax

EPSILON = 1e-5
"""Of the layer normalizations."""


class NetworkWeights(NamedTuple):
    """The parameters of one small network, for each of N sketches: LayerNorm, M → E, gelu, → r, twice.

    Attributes:
        kernels: [N, M, E], [N, E, r], [N, r, E], [N, E, r].
        scales: of the layer normalizations, [N, 1, M] and [N, 1, r].
        biases: of the layer normalizations, the same shapes.
    """

    kernels: tuple[jax.Array, jax.Array, jax.Array, jax.Array]
    scales: tuple[jax.Array, jax.Array]
    biases: tuple[jax.Array, jax.Array]


Nodes = tuple[tuple[NetworkWeights, NetworkWeights], ...]
"""The two networks of each node of the tree: those above the leaves first, the root last."""


class Sketched(NamedTuple):
    """What becomes of arrays of vectors.

    Attributes:
        sketches: of each array, [B, L, N, G, r].
        vectors: the arrays as they were given. What reads them from here gets its gradient added to that of the
            networks where this is formed, which on TPUs is on chip.
    """

    sketches: tuple[jax.Array, ...]
    vectors: tuple[jax.Array, ...]


def climb(
    nodes: Nodes, leaf: jax.Array, join: Callable[[NetworkWeights, NetworkWeights, jax.Array, jax.Array], jax.Array]
):
    """The root of the binary tree whose leaves are all `leaf`; `join` makes a node of its networks and two children."""
    level, remaining = [leaf] * (len(nodes) + 1), iter(nodes)
    while len(level) > 1:
        level = [join(*next(remaining), left, right) for left, right in zip(level[::2], level[1::2], strict=True)]
    return level[0]
