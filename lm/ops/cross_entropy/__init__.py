"""The loss of a language model, in nats per token, from the last hidden layer: logits never exist whole.

B batch, L length, D width, V vocabulary, P devices among which the batch is split.
"""

from typing import Annotated

import jax

from lm.ops import platform
from lm.ops.arguments import check_cap, check_counts, check_shapes
from lm.ops.cross_entropy.cap import capped
from lm.ops.cross_entropy.types import (
    CrossEntropyCall,
    WeightedCall,
)

IMPLEMENTATIONS = platform.Implementations('cross-entropy', __name__, reference='reference', xla='xla')
"""Each module has `cross_entropy(call: CrossEntropyCall)`, which returns the nats, and the log-normalizers or None. It
also has `weighted_cross_entropy(call: WeightedCall)`, which returns the parts of the sum [P, 1], and the nats."""


def cross_entropy(
    x_BxLxD: jax.Array,
    embedding_VxD: jax.Array,
    bias_V: jax.Array | None,
    targets_BxL: jax.Array,
    *,
    cap: float | None = None,
    normalizer: bool = False,
    chunk: int | None = None,
    implementation: str | None = None,
) -> Annotated[jax.Array, 'BxL'] | tuple[Annotated[jax.Array, 'BxL'], Annotated[jax.Array, 'BxL']]:
    """Computes -log softmax(x · embedding^T + bias)[target] of every token.

    Matrix products are in the dtype of x with float32 accumulation; all else is float32.

    Args:
        x_BxLxD: the last hidden layer; under a mesh the batch may be split over its axes.
        embedding_VxD: the vocabulary's vectors.
        bias_V: the vocabulary's bias, or None.
        targets_BxL: token ids in [0, V), which nothing checks here; an id of V or more gives NaN.
        cap: logits are cap · tanh(logit / cap), within ±cap (Gemma 2, §2); None leaves them as they are.
        normalizer: whether the log-normalizers log Σ_v exp(logit_v) are returned too, for a loss that holds them near
            zero (the z-loss of PaLM, §5).
        chunk: positions per chunk; None keeps a chunk's logits within a budget of bytes per device.
        implementation: 'xla' or 'reference'; None picks the platform's.

    Returns:
        [B, L] float32 nats; with `normalizer` these and the log-normalizers, [B, L] float32.

    Raises:
        OperationError: arrays or options that do not fit together, or an unknown implementation.
    """
    call = CrossEntropyCall(x_BxLxD, embedding_VxD, bias_V, targets_BxL, cap=cap, normalizer=normalizer, chunk=chunk)
    _check(call)
    nats_BxL, log_normalizers_BxL = IMPLEMENTATIONS.choose(implementation, call).cross_entropy(call)
    return nats_BxL if log_normalizers_BxL is None else (nats_BxL, log_normalizers_BxL)


def weighted_cross_entropy(
    x_BxLxD: jax.Array,
    embedding_VxD: jax.Array,
    bias_V: jax.Array | None,
    targets_BxL: jax.Array,
    weights_BxL: jax.Array,
    *,
    cap: float | None = None,
    z_loss: float = 0.0,
    chunk: int | None = None,
    implementation: str | None = None,
) -> tuple[Annotated[jax.Array, 'Px1'], Annotated[jax.Array, 'BxL']]:
    """Computes Σ weight · (nats + z_loss · log-normalizer²) over all tokens: what a training step minimizes.

    Its gradients take three products of the vocabulary's size, where the gradients of single losses take four: they
    are formed with the loss, while the logits are there.

    Args:
        x_BxLxD: as in `cross_entropy`, like all arguments that are not listed here.
        weights_BxL: float32, such as 1 / (B · L) for the mean.
        z_loss: the factor of the z-loss (`cross_entropy`, `normalizer`).

    Returns:
        float32 [P, 1], the sum's parts on each of P devices; and the nats [B, L] float32, to which no gradient flows.

    Raises:
        OperationError: arrays or options that do not fit together, or an unknown implementation.
    """
    arrays = (x_BxLxD, embedding_VxD, bias_V, targets_BxL)
    call = WeightedCall(*arrays, weights_BxL=weights_BxL, cap=cap, z_loss=z_loss, chunk=chunk)
    _check(call)
    check_shapes({'weights_BxL': weights_BxL}, **dict(zip('BL', targets_BxL.shape, strict=True)))
    return IMPLEMENTATIONS.choose(implementation, call).weighted_cross_entropy(call)


def _check(call: CrossEntropyCall) -> None:
    """Raises OperationError for arrays or options that do not fit together."""
    arrays = {'x_BxLxD': call.x_BxLxD, 'embedding_VxD': call.embedding_VxD, 'bias_V': call.bias_V}
    check_shapes(arrays | {'targets_BxL': call.targets_BxL})
    check_counts(chunk=call.chunk)
    check_cap('cap', call.cap)


__all__ = [
    'IMPLEMENTATIONS',
    'CrossEntropyCall',
    'WeightedCall',
    'capped',
    'cross_entropy',
    'weighted_cross_entropy',
]
