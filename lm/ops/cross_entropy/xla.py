"""Cross-entropy in chunks of the sequence: the [tokens, vocabulary] logits never exist whole.

The chunks run along the sequence, so a batch that is split over devices stays where it is. The gradient of the
embedding is summed in float32. Gradients of single tokens' losses compute each chunk's logits again, from the saved
log-normalizer. Gradients of a weighted sum are known but for a factor, so they are formed while the logits are there.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax

from lm.ops import platform
from lm.ops.blocks import even_block, find_new, loop, put, start, take
from lm.ops.cross_entropy.cap import capped, capped_slope
from lm.ops.cross_entropy.types import CrossEntropyCall, WeightedCall
from lm.ops.custom_vjp import custom_vjp
from lm.ops.dots import dot

Call = TypeVar('Call', bound=CrossEntropyCall)

LOGIT_BYTES = {'cpu': 64 * 2**20, 'gpu': 512 * 2**20, 'tpu': 512 * 2**20}
"""The most bytes of float32 logits that a device has at a time (in two copies during the backward pass)."""

CPU_TOKENS = 512
"""Measured: fewer tokens a chunk spend their time on the embedding's gradient, more leave the cache."""

BY_ROW = {'x_BxLxD', 'targets_BxL', 'weights_BxL'}
"""The arrays of a call whose leading axis is the batch."""

LEAST_SUM = 1e-26
"""The least sum of exponentials in which what counts of a sum over a million of them is no subnormal number."""


_Gradients = tuple[jax.Array, jax.Array, jax.Array | None]
"""The gradients of x, which the chunks fill, and of the embedding and the bias, which they add up in float32."""


class TokenGradients(NamedTuple):
    """The numbers per token from which the gradient of the logits is made; T is [B, L], or a chunk's [B, C]."""

    log_normalizer_T: jax.Array
    target_T: jax.Array
    dnats_T: jax.Array
    dlog_normalizer_T: jax.Array | None


def cross_entropy(call: CrossEntropyCall) -> tuple[jax.Array, jax.Array | None]:
    """Computes the losses chunk by chunk; the backward pass computes each chunk's logits again."""
    return _per_device(_compute_losses, call)


def weighted_cross_entropy(call: WeightedCall) -> tuple[jax.Array, jax.Array]:
    """Computes the sum and its gradients chunk by chunk, in one pass over the logits."""
    total_Px1, nats_BxL = _per_device(_compute_weighted, dataclasses.replace(call, normalizer=True))
    return total_Px1, lax.stop_gradient(nats_BxL)


def _chunk(call: CrossEntropyCall) -> int:
    """Returns the positions per chunk."""
    (batch, length), chunk, target = call.targets_BxL.shape, call.chunk, platform.target_platform()
    if chunk is None:
        tokens = LOGIT_BYTES.get(target, 2**28) // (call.embedding_VxD.shape[0] * 4)
        rows = -(-batch // platform.batch_shards())
        chunk = max(1, (min(tokens, CPU_TOKENS) if target == 'cpu' else tokens) // rows)
    return even_block(length, chunk)


def _per_device(function: Callable, call: CrossEntropyCall) -> Any:
    """Computes a function of a call, whose chunk is chosen, on each device's rows where these are as many."""
    call = dataclasses.replace(call, chunk=_chunk(call))
    if call.targets_BxL.shape[0] % platform.batch_shards():
        return function(call)
    arrays, tree = jax.tree.flatten_with_path(call)
    split = tuple(path[0].name in BY_ROW for path, _ in arrays)
    return platform.per_device(lambda *rows: function(tree.unflatten(rows)), split)(*(array for _, array in arrays))


def _logits(x_BxCxD: jax.Array, embedding_VxD: jax.Array, bias_V: jax.Array | None, cap: float | None) -> jax.Array:
    logits_BxCxV = dot('bcd,vd->bcv', x_BxCxD, embedding_VxD)
    return capped(logits_BxCxV if bias_V is None else logits_BxCxV + bias_V.astype(jnp.float32), cap)


def _log_normalizers(logits_BxCxV: jax.Array) -> jax.Array:
    """Computes log Σ_v exp(logit_v), [B, C].

    A sum that no maximum precedes is formed by the product that makes the logits: a pass over them less. Where one
    leaves the range of float32, all are formed again, with their maxima.
    """
    sum_BxC = jnp.exp(logits_BxCxV).sum(-1)
    precise = ((sum_BxC > LEAST_SUM) & (sum_BxC < jnp.inf)).all()
    return lax.cond(precise, lambda: jnp.log(sum_BxC), lambda: jax.nn.logsumexp(logits_BxCxV, axis=-1))


def _losses(logits_BxCxV: jax.Array, targets_BxC: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns nats, and the log-normalizers."""
    total_BxC = _log_normalizers(logits_BxCxV)
    return total_BxC - jnp.take_along_axis(logits_BxCxV, targets_BxC[..., None], -1)[..., 0], total_BxC


def _logit_gradients(logits_BxCxV, tokens: TokenGradients, cap: float | None) -> tuple[jax.Array, jax.Array]:
    """Returns the gradient of the logits twice, for the two products that take it.

    On TPUs each product forms its own from the logits while it runs: one for both would be written to memory, on all
    chips but v5e.
    """
    first_BxCxV = _logit_gradient(logits_BxCxV, tokens, cap)
    if platform.target_platform() != 'tpu':
        return first_BxCxV, first_BxCxV
    return first_BxCxV, _logit_gradient(lax.optimization_barrier(logits_BxCxV), tokens, cap)


def _logit_gradient(logits_BxCxV: jax.Array, tokens: TokenGradients, cap: float | None) -> jax.Array:
    """Returns the gradient of the logits before their cap."""
    weight_BxCxV = jnp.exp(logits_BxCxV - tokens.log_normalizer_T[..., None])
    target_BxCxV = tokens.target_T[..., None] == jnp.arange(logits_BxCxV.shape[-1])
    dlogits_BxCxV = jnp.where(target_BxCxV, weight_BxCxV - 1.0, weight_BxCxV) * tokens.dnats_T[..., None]
    if tokens.dlog_normalizer_T is not None:
        dlogits_BxCxV += weight_BxCxV * tokens.dlog_normalizer_T[..., None]
    return dlogits_BxCxV if cap is None else dlogits_BxCxV * capped_slope(logits_BxCxV, cap)


def _no_gradients(call: CrossEntropyCall) -> _Gradients:
    dbias_V = None if call.bias_V is None else jnp.zeros(call.bias_V.shape, jnp.float32)
    return jnp.zeros_like(call.x_BxLxD), jnp.zeros(call.embedding_VxD.shape, jnp.float32), dbias_V


def _add(
    gradients: _Gradients,
    dlogits: tuple[jax.Array, jax.Array],
    x_BxCxD: jax.Array,
    weights_VxD: jax.Array,
    i: jax.Array,
    chunk: int,
) -> _Gradients:
    """Adds the gradients of chunk i; positions that the chunk before has, too, count once.

    `dlogits` are the two arrays of `_logit_gradients`.
    """
    dx_BxLxD, dembedding_VxD, dbias_V = gradients
    length = dx_BxLxD.shape[1]
    for_x_BxCxV, dlogits_BxCxV = (a.astype(dx_BxLxD.dtype) for a in dlogits)
    dx_BxCxD = dot('bcv,vd->bcd', for_x_BxCxV, weights_VxD)
    dx_BxLxD = put(dx_BxLxD, dx_BxCxD, start(i, chunk, length), 1)
    if length % chunk:
        x_BxCxD = jnp.where(find_new(i, chunk, length)[:, None], x_BxCxD, 0)
    dembedding_VxD += dot('bcv,bcd->vd', dlogits_BxCxV, x_BxCxD)
    if dbias_V is not None:
        fresh_C = find_new(i, chunk, length).astype(dlogits_BxCxV.dtype)
        dbias_V += jnp.einsum('bcv,c->v', dlogits_BxCxV, fresh_C, preferred_element_type=jnp.float32)
    return dx_BxLxD, dembedding_VxD, dbias_V


def _turn(call: Call, gradients: _Gradients) -> Call:
    """Returns the call with the gradients of its arrays, in their dtypes, in place of these."""
    dx_BxLxD, dembedding_VxD, dbias_V = gradients
    return dataclasses.replace(
        call,
        x_BxLxD=dx_BxLxD,
        embedding_VxD=dembedding_VxD.astype(call.embedding_VxD.dtype),
        bias_V=None if dbias_V is None or call.bias_V is None else dbias_V.astype(call.bias_V.dtype),
        targets_BxL=cast(jax.Array, None),  # what JAX takes for the gradient of an array that has none
    )


@custom_vjp()
def _compute_losses(call: CrossEntropyCall) -> tuple[jax.Array, jax.Array | None]:
    """Returns the nats, and the log-normalizers where the call asks for them."""
    return _forward(call)[0]


def _forward(call: CrossEntropyCall):
    """Returns the results of `_compute_losses`, and the residuals: the call and the log-normalizers."""
    chunk, cap, length = cast(int, call.chunk), call.cap, call.targets_BxL.shape[1]
    weights_VxD = call.embedding_VxD.astype(call.x_BxLxD.dtype)

    def one_chunk(i, outputs):
        at = start(i, chunk, length)
        logits_BxCxV = _logits(take(call.x_BxLxD, at, chunk, 1), weights_VxD, call.bias_V, cap)
        found = _losses(logits_BxCxV, take(call.targets_BxL, at, chunk, 1))
        return tuple(put(x_BxL, x_BxC, at, 1) for x_BxL, x_BxC in zip(outputs, found, strict=True))

    zeros_BxL = jnp.zeros(call.targets_BxL.shape, jnp.float32)
    n_chunks = -(-length // chunk)
    nats_BxL, total_BxL = loop(0, n_chunks, one_chunk, (zeros_BxL, zeros_BxL), n_chunks == 1)
    return (nats_BxL, total_BxL if call.normalizer else None), (call, total_BxL)


def _backward(residuals: tuple[CrossEntropyCall, jax.Array], cotangents) -> tuple[CrossEntropyCall]:
    call, total_BxL = residuals
    chunk, cap, length = cast(int, call.chunk), call.cap, call.targets_BxL.shape[1]
    weights_VxD = call.embedding_VxD.astype(call.x_BxLxD.dtype)
    tokens = TokenGradients(total_BxL, call.targets_BxL, *cotangents)

    def one_chunk(i, gradients):
        at = start(i, chunk, length)
        x_BxCxD = take(call.x_BxLxD, at, chunk, 1)
        logits_BxCxV = _logits(x_BxCxD, weights_VxD, call.bias_V, cap)
        chunk_tokens = jax.tree.map(lambda x_BxL: take(x_BxL, at, chunk, 1), tokens)
        dlogits = _logit_gradients(logits_BxCxV, chunk_tokens, cap)
        return _add(gradients, dlogits, x_BxCxD, weights_VxD, i, chunk)

    n_chunks = -(-length // chunk)
    gradients = loop(0, n_chunks, one_chunk, _no_gradients(call), n_chunks == 1)
    return (_turn(call, gradients),)


_compute_losses.defvjp(_forward, _backward)


@custom_vjp()
def _compute_weighted(call: WeightedCall) -> tuple[jax.Array, jax.Array]:
    """Returns the sum, [1, 1], and the nats, whose gradient is left out."""
    nats_BxL, total_BxL = _compute_losses(call)
    return _sum(call, nats_BxL, total_BxL)[0], nats_BxL


def _sum(call: WeightedCall, nats_BxL, total_BxL) -> tuple[jax.Array, jax.Array]:
    """Returns the sum, [1, 1], and the losses, [B, L], of which each weight takes one."""
    losses_BxL = nats_BxL + call.z_loss * total_BxL**2 if call.z_loss else nats_BxL
    counted_BxL = call.weights_BxL != 0.0  # what does not count may be NaN
    return jnp.sum(call.weights_BxL * losses_BxL, where=counted_BxL, keepdims=True), losses_BxL


def _weighted_forward(call: WeightedCall):
    """Returns the results of `_compute_weighted`, and the residual: the gradients of the arrays of the call."""
    chunk, cap, length = cast(int, call.chunk), call.cap, call.targets_BxL.shape[1]
    weights_VxD = call.embedding_VxD.astype(call.x_BxLxD.dtype)

    def one_chunk(i, carry):
        outputs, gradients = carry
        at = start(i, chunk, length)
        by_token = (call.x_BxLxD, call.targets_BxL, call.weights_BxL)
        x_BxCxD, targets_BxC, weights_BxC = (take(x, at, chunk, 1) for x in by_token)
        logits_BxCxV = _logits(x_BxCxD, weights_VxD, call.bias_V, cap)
        nats_BxC, total_BxC = _losses(logits_BxCxV, targets_BxC)
        outputs = tuple(put(*pair, at, 1) for pair in zip(outputs, (nats_BxC, total_BxC), strict=True))
        dtotal_BxC = 2.0 * call.z_loss * total_BxC * weights_BxC if call.z_loss else None
        tokens = TokenGradients(total_BxC, targets_BxC, weights_BxC, dtotal_BxC)
        dlogits = _logit_gradients(logits_BxCxV, tokens, cap)
        return outputs, _add(gradients, dlogits, x_BxCxD, weights_VxD, i, chunk)

    zeros_BxL = jnp.zeros(call.targets_BxL.shape, jnp.float32)
    n_chunks = -(-length // chunk)
    empty = ((zeros_BxL, zeros_BxL), _no_gradients(call))
    (nats_BxL, total_BxL), gradients = loop(0, n_chunks, one_chunk, empty, n_chunks == 1)
    sum_1x1, losses_BxL = _sum(call, nats_BxL, total_BxL)
    return (sum_1x1, nats_BxL), dataclasses.replace(_turn(call, gradients), weights_BxL=losses_BxL)


def _weighted_backward(gradients: WeightedCall, cotangents) -> tuple[WeightedCall]:
    factor = cotangents[0][0, 0]
    return (jax.tree.map(lambda gradient: (factor * gradient).astype(gradient.dtype), gradients),)


_compute_weighted.defvjp(_weighted_forward, _weighted_backward)
