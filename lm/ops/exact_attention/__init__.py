"""Exact attention, softmax or polynomial, in memory linear in the length.

B batch, L queries, M keys, H query heads, K key and value heads (K divides H; head h reads key head h // (H / K)),
D head size. Which implementation runs is decided by the platform that the computation is traced for.
"""

import dataclasses
from typing import Annotated, TypeVar

import jax
import jax.numpy as jnp

from lm.ops import platform, sequence
from lm.ops.arguments import check_cap, check_counts, check_heads, check_shapes
from lm.ops.documents import forgetting
from lm.ops.errors import OperationError
from lm.ops.exact_attention.types import (
    ExactCall,
    PolynomialCall,
    SoftmaxCall,
)
from lm.ops.platform import sequence_shards

SOFTMAX = platform.Implementations(
    'softmax attention',
    __name__,
    preferred={'tpu': ('pallas_tpu', 'splash'), 'gpu': ('cudnn',)},
    reference='reference',
    xla='xla',
    pallas_tpu='tpu.softmax',
    splash='tpu.splash',
    cudnn='cudnn',
)
"""Each module has `softmax_attention(call: SoftmaxCall) -> jax.Array`."""
POLYNOMIAL = platform.Implementations(
    'polynomial attention', __name__, reference='reference', xla='xla', pallas_tpu='tpu.polynomial', pallas_gpu='gpu'
)
"""Each module has `polynomial_attention(call: PolynomialCall) -> jax.Array`."""


def softmax_attention(
    q_BxLxHxD: jax.Array,
    k_BxMxKxD: jax.Array,
    v_BxMxKxD: jax.Array,
    *,
    scale: float | None = None,
    window: int | None = None,
    causal: bool = True,
    q_offset: jax.Array | int = 0,
    k_start: jax.Array | int = 0,
    starts_BxL: jax.Array | None = None,
    log_decay_BxMxK: jax.Array | None = None,
    score_cap: float | None = None,
    sinks_H: jax.Array | None = None,
    block: int | None = None,
    implementation: str | None = None,
) -> Annotated[jax.Array, 'BxLxHxD']:
    """Computes softmax attention: weights exp(scale ⟨q_i, k_j⟩) / Σ_j' exp(scale ⟨q_i, k_j'⟩).

    A cap c takes c tanh(scale ⟨q_i, k_j⟩ / c) for scale ⟨q_i, k_j⟩ (Gemma 2, Gemma Team 2024, §2). A sink adds
    exp(sink) to the denominator (gpt-oss, OpenAI 2025, §2.2), so that the weights of a query have a sum below 1.

    Args:
        q_BxLxHxD: queries.
        k_BxMxKxD: keys.
        v_BxMxKxD: values.
        scale: 1 / sqrt(head size) where None.
        window: a query sees its own and the `window - 1` keys before it; None sees all.
        causal: whether keys after a query are hidden.
        q_offset: the index of the key that stands at the first query's position (decoding with a cache).
        k_start: keys before this index are hidden.
        starts_BxL: for each query the first key that it sees, int32, ascending along L (`lm.ops.documents`), where
            queries and keys belong to the same tokens, or the keys begin `q_offset` before; None: as the other
            arguments say.
        log_decay_BxMxK: logs of the factors, at most 0, by which the token of each key multiplies the weights of all
            keys before it, for itself and the tokens after it; -inf and all below -104 hide them. Gradients flow to it.
            None: no decay.
        score_cap: c, above 0; None: scores are not capped. Decay is added to the capped scores.
        sinks_H: a logit per query head, float32. Gradients flow to it. None: no sinks.
        block: tokens per block; None picks what is fast.
        implementation: one of `SOFTMAX`; None picks the platform's.

    Returns:
        [B, L, H, D] in the dtype of q. Every query must see at least one key.

    Raises:
        OperationError: arrays or options that do not fit, or an implementation that does not support the call.
    """
    call = SoftmaxCall(
        q_BxLxHxD,
        k_BxMxKxD,
        v_BxMxKxD,
        scale=q_BxLxHxD.shape[-1] ** -0.5 if scale is None else scale,
        window=window,
        causal=causal,
        q_offset=q_offset,
        k_start=k_start,
        starts_BxL=starts_BxL,
        log_decay_BxMxK=log_decay_BxMxK,
        score_cap=score_cap,
        sinks_H=sinks_H,
        block=block,
    )
    _check(call)
    check_cap('score_cap', score_cap)
    check_shapes({'sinks_H': sinks_H}, H=q_BxLxHxD.shape[2])
    call = _with_keys_of_other_parts(_with_decay_of_documents(call))
    return SOFTMAX.choose(implementation, call).softmax_attention(call)


def polynomial_attention(
    q_BxLxHxD: jax.Array,
    k_BxMxKxD: jax.Array,
    v_BxMxKxD: jax.Array,
    *,
    degree: int,
    denominator_bias: float = 1.0,
    scale: float = 1.0,
    causal: bool = True,
    q_offset: jax.Array | int = 0,
    k_start: jax.Array | int = 0,
    starts_BxL: jax.Array | None = None,
    log_decay_BxMxK: jax.Array | None = None,
    block: int | None = None,
    implementation: str | None = None,
) -> Annotated[jax.Array, 'BxLxHxD']:
    """Computes polynomial attention (PolySketchFormer §2.1), where q and k have been through layer normalization.

    The weights are (scale ⟨q_i, k_j⟩)^degree / (denominator_bias + Σ_j' (scale ⟨q_i, k_j'⟩)^degree).

    Args:
        q_BxLxHxD: as in `softmax_attention`, like all arguments that are not listed here.
        degree: even, so that no weight is negative.
        denominator_bias: keeps the denominator from zero.
        scale: factor of the inner products.

    Raises:
        OperationError: as in `softmax_attention`, and for an odd degree.
    """
    call = PolynomialCall(
        q_BxLxHxD,
        k_BxMxKxD,
        v_BxMxKxD,
        degree=degree,
        denominator_bias=denominator_bias,
        scale=scale,
        causal=causal,
        q_offset=q_offset,
        k_start=k_start,
        starts_BxL=starts_BxL,
        log_decay_BxMxK=log_decay_BxMxK,
        block=block,
    )
    _check(call)
    if degree < 2 or degree % 2:
        raise OperationError(f'degree = {degree}: must be even and at least 2, so that no weight is negative')
    call = _with_keys_of_other_parts(_with_decay_of_documents(call))
    return POLYNOMIAL.choose(implementation, call).polynomial_attention(call)


SomeCall = TypeVar('SomeCall', bound=ExactCall)


def _with_decay_of_documents(call: SomeCall) -> SomeCall:
    """Replaces the factor of each document's first token by 0, so that the sums of the logs begin anew there.

    No weight changes, because no query sees keys of other documents. But a sum from the window's start would carry the
    rounding of those documents into this one.
    """
    starts_BxL, log_decay = call.starts_BxL, call.log_decay_BxMxK
    if starts_BxL is None or log_decay is None:
        return call
    if call.is_whole:
        return dataclasses.replace(call, log_decay_BxMxK=forgetting(starts_BxL, log_decay, log_decay.shape[-1]))
    batch, keys, _ = log_decay.shape
    # Starts before the first key are dropped, not counted from the end.
    place_BxL = jnp.where(starts_BxL < 0, keys, starts_BxL)
    first_BxM = jnp.zeros((batch, keys), bool).at[jnp.arange(batch)[:, None], place_BxL].set(True, mode='drop')
    return dataclasses.replace(call, log_decay_BxMxK=jnp.where(first_BxM[..., None], -jnp.inf, log_decay))


def _with_keys_of_other_parts(call: SomeCall) -> SomeCall:
    """Adds the keys and values of the other devices that share a window, as far as the queries of this device see them.

    The result has `q_offset`, `k_start` and `starts_BxL` of these keys.
    """
    if sequence_shards() == 1:
        return call
    keys = (call.k_BxMxKxD, call.v_BxMxKxD, call.log_decay_BxMxK)
    length, window = call.q_BxLxHxD.shape[1], call.window
    if window is None or window - 1 > length:
        k, v, decay = jax.tree.map(sequence.gathered, keys)
        offset = sequence.index() * length
        return dataclasses.replace(call, k_BxMxKxD=k, v_BxMxKxD=v, log_decay_BxMxK=decay, q_offset=offset)
    before = window - 1

    def reach(x: jax.Array) -> jax.Array:
        return jnp.concatenate([sequence.tokens_before(x, before), x], axis=1) if before else x

    k, v, decay = jax.tree.map(reach, keys)
    k_start, starts_BxL = jnp.where(sequence.index() == 0, before, 0), call.starts_BxL
    if starts_BxL is not None:
        starts_BxL = starts_BxL - (sequence.index() * length - before)
    call = dataclasses.replace(call, k_BxMxKxD=k, v_BxMxKxD=v, log_decay_BxMxK=decay)
    return dataclasses.replace(call, q_offset=before, k_start=k_start, starts_BxL=starts_BxL)


def _check(call: ExactCall) -> None:
    """Raises OperationError for arrays or options that do not fit together."""
    q, k, v, log_decay = call.q_BxLxHxD, call.k_BxMxKxD, call.v_BxMxKxD, call.log_decay_BxMxK
    arrays = {'q_BxLxHxD': q, 'k_BxMxKxD': k, 'v_BxMxKxV': v, 'log_decay_BxMxK': log_decay}
    check_shapes(arrays | {'starts_BxL': call.starts_BxL})
    check_heads(q.shape[2], k.shape[2])
    check_counts(window=call.window, block=call.block)
    decodes = not isinstance(call.q_offset, int) or call.q_offset > 0
    if call.starts_BxL is not None and (not call.causal or (q.shape[1] != k.shape[1] and not decodes)):
        raise OperationError(
            'starts_BxL: documents are told apart among the queries and keys of the same tokens only, causally'
        )
    if log_decay is not None and not call.causal:
        raise OperationError('causal = False: decay needs causal attention; leave log_decay out')


__all__ = [
    'POLYNOMIAL',
    'SOFTMAX',
    'PolynomialCall',
    'SoftmaxCall',
    'polynomial_attention',
    'softmax_attention',
]
