"""Queries and keys on their way from their projection to the attention: rotated by their positions (Su et al. 2021).

The model may divide them by their root mean square before (Zhang and Sennrich 2019). The mechanism may ask for a layer
normalization after.

B batch, L length, H query heads, K key heads, N = H + K, C head size.
"""

from typing import Annotated

import jax

from lm.ops import platform
from lm.ops.arguments import check_shapes
from lm.ops.errors import OperationError
from lm.ops.rotary.types import HeadNorms, RootNorms, RotaryCall, Rotation

IMPLEMENTATIONS = platform.Implementations('rotary', __name__, reference='reference', xla='xla', pallas_tpu='tpu')
"""Each module has `rotate(call: RotaryCall)`, which returns queries and keys."""


def rotate(
    qk_BxLxNxC: jax.Array,
    rotation: Rotation | None,
    n_heads: int,
    norms: HeadNorms | None = None,
    roots: RootNorms | None = None,
    *,
    implementation: str | None = None,
) -> tuple[Annotated[jax.Array, 'BxLxHxC'], Annotated[jax.Array, 'BxLxKxC']]:
    """Returns queries [B, L, H, C] and keys [B, L, K, C].

    Args:
        qk_BxLxNxC: the projection's product, queries before keys.
        rotation: the angles that turn the pairs (c, c + C/2) of each head, in float32; None: nothing is rotated.
        n_heads: how many heads are queries (H).
        norms: layer normalizations of the rotated vectors, in float32; None: there are none.
        roots: root-mean-square normalizations before the rotation, in float32; None: there are none.
        implementation: one of `IMPLEMENTATIONS`; None picks the platform's.

    Raises:
        OperationError: arrays that do not fit together, an unknown implementation, or one that does not support the
            call.
    """
    call = RotaryCall(qk_BxLxNxC, rotation, n_heads, norms, roots)
    _check(call)
    if rotation is None and norms is None and roots is None:
        return qk_BxLxNxC[:, :, :n_heads], qk_BxLxNxC[:, :, n_heads:]
    chosen = IMPLEMENTATIONS.choose(implementation, call)
    with jax.named_scope('rotary'):
        return chosen.rotate(call)


def _check(call: RotaryCall) -> None:
    """Raises OperationError for arrays that do not fit together."""
    arrays: dict[str, jax.Array | None] = {'qk_BxLxNxC': call.qk_BxLxNxC}
    if (norms := call.norms) is not None:
        scales = {'norms.q_scale_C': norms.q_scale_C, 'norms.k_scale_C': norms.k_scale_C}
        arrays |= scales | {'norms.q_bias_C': norms.q_bias_C, 'norms.k_bias_C': norms.k_bias_C}
    if (roots := call.roots) is not None:
        arrays |= {'roots.q_gain_C': roots.q_gain_C, 'roots.k_gain_C': roots.k_gain_C}
    check_shapes(arrays)
    batch, length, heads, size = call.qk_BxLxNxC.shape
    if not 0 < call.n_heads <= heads:
        raise OperationError(f'n_heads = {call.n_heads}: must be 1 to {heads}, the heads of qk')
    if call.rotation is None:
        return
    if size % 2:
        raise OperationError(f'qk of shape {call.qk_BxLxNxC.shape}: rotated heads must have an even size')
    for name, angles in zip(('cos', 'sin'), call.rotation, strict=True):
        axes = 'BxLx1xP' if angles.ndim == 4 else 'Lx1xP'
        check_shapes({f'rotation.{name}_{axes}': angles}, B=batch, L=length, P=size // 2)


__all__ = ['IMPLEMENTATIONS', 'HeadNorms', 'RootNorms', 'RotaryCall', 'Rotation', 'rotate']
