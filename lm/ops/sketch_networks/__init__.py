"""The learned sketch ψ: small networks joined in a tree, shared by queries and keys (PolySketchFormer, Algorithm 2).

    a node      √r tanh(√(1/r) [f₁(left) ∗ f₂(right)]), ∗ entry by entry; every leaf is the vector itself
    a network   f(x) = LayerNorm, M → E, gelu, → r, LayerNorm, → E, gelu, → r, without biases in the maps (App. D)

B batch, L length, N sketches of G heads each, M vector size, E hidden units, r sketch size. The hidden layers are 4 E
numbers per vector and node, many times the vector itself, so no implementation keeps them for the whole sequence.
"""

import jax

from lm.ops import platform
from lm.ops.arguments import check_shapes
from lm.ops.errors import OperationError
from lm.ops.sketch_networks.types import (
    LevelWeights,
    NetworkWeights,
    Node,
    Nodes,
    SketchCall,
    Sketched,
)

IMPLEMENTATIONS = platform.Implementations(
    'sketch networks',
    __name__,
    reference='reference',
    xla='xla',
    pallas_tpu='tpu.networks',
    pallas_gpu='gpu.networks',
)
"""Each module has `sketch_networks(call: SketchCall) -> Sketched`."""


def sketch_networks(nodes: Nodes, *xs_BxLxNxGxM: jax.Array, implementation: str | None = None) -> Sketched:
    """Returns ψ of the vectors of each array, [B, L, N, G, r] in its dtype, and the vectors, for what reads them too.

    Args:
        nodes: the two networks of each node of a binary tree over P copies of the vector: the P / 2 above the leaves
            first, the root last, P - 1 of them; P is a power of two above 1.
        xs_BxLxNxGxM: arrays, of the same dtype, whose vectors share the sketches (queries and keys); G may differ.
        implementation: one of `IMPLEMENTATIONS`; None picks the platform's.

    Raises:
        OperationError: arrays that do not fit together, an unknown implementation, or one that does not support the
            call.
    """
    call = SketchCall(nodes, xs_BxLxNxGxM)
    _check(call)
    return IMPLEMENTATIONS.choose(implementation, call).sketch_networks(call)


def _check(call: SketchCall) -> None:
    """Raises OperationError for nodes that make no tree, and for arrays that do not fit them."""
    copies = len(call.nodes) + 1
    if copies < 2 or copies & (copies - 1):
        raise OperationError(f'nodes: {len(call.nodes)} of them; must be 1, 3, 7 …, the nodes of a binary tree')
    if not call.xs_BxLxNxGxM:
        raise OperationError('xs: must hold at least one array of vectors')
    arrays = {f'xs_BxLxNxG{i}xM': x_BxLxNxGxM for i, x_BxLxNxGxM in enumerate(call.xs_BxLxNxGxM)}
    check_shapes(arrays, N=call.sizes.n, M=call.sizes.size)


__all__ = [
    'IMPLEMENTATIONS',
    'LevelWeights',
    'NetworkWeights',
    'Node',
    'Nodes',
    'SketchCall',
    'Sketched',
    'sketch_networks',
]
