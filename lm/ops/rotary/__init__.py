"""Queries and keys on their way from their projection to the attention: rotated by their positions (Su et al. 2021),
and layer-normalized where the mechanism asks for it.

B batch, L length, H query heads, K key heads, N = H + K, C head size.
"""

import jax

from lm.ops import platform
from lm.ops.rotary.types import HeadNorms, QueriesAndKeys, RotaryCall, RotaryImplementation, Rotation

IMPLEMENTATIONS = platform.Implementations[RotaryImplementation, RotaryCall](
    'rotary', __name__, reference='reference', xla='xla', pallas_tpu='tpu'
)


def rotate(
    qk_BxLxNxC: jax.Array,
    rotation: Rotation | None,
    n_heads: int,
    norms: HeadNorms | None = None,
    *,
    implementation: str | None = None,
) -> QueriesAndKeys:
    """Returns queries [B, L, H, C] and keys [B, L, K, C].

    Args:
        qk_BxLxNxC: the projection's product, queries before keys.
        rotation: the angles that turn the pairs (c, c + C/2) of each head, in float32; None: nothing is rotated.
        n_heads: how many heads are queries (H).
        norms: layer normalizations of the rotated vectors, in float32; None: there are none.
        implementation: one of `IMPLEMENTATIONS`; None picks the platform's.

    Raises:
        OperationError: an unknown implementation, or one that does not support the call.
    """
    if rotation is None and norms is None:
        return QueriesAndKeys(qk_BxLxNxC[:, :, :n_heads], qk_BxLxNxC[:, :, n_heads:])
    call = RotaryCall(qk_BxLxNxC, rotation, n_heads, norms)
    chosen = IMPLEMENTATIONS.choose(implementation, call)
    with jax.named_scope('rotary'):
        return chosen.rotate(call)


__all__ = ['IMPLEMENTATIONS', 'HeadNorms', 'QueriesAndKeys', 'RotaryCall', 'Rotation', 'rotate']
