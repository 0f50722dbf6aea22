"""Cross-entropy in chunks of the sequence: the [tokens, vocabulary] logits never exist whole.

The chunks run along the sequence, so a batch that is split over devices stays where it is. The gradient of the
embedding is summed in float32. Gradients of single tokens' losses compute each chunk's logits again, from the saved
log-normaliser; those of a weighted sum, which are known but for a factor, are formed while the logits are there.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from lm.ops import platform
from lm.ops.blocks import even_block, fresh, loop, put, start, take
from lm.ops.cross_entropy.cap import capped, capped_slope
from lm.ops.dots import dot

LOGIT_BYTES = {'cpu': 64 * 2**20, 'gpu': 512 * 2**20, 'tpu': 512 * 2**20}
"""The most bytes of float32 logits that a device has at a time (in two copies during the backward pass)."""

CPU_TOKENS = 512
"""Measured: fewer tokens a chunk spend their time on the embedding's gradient, more leave the cache."""

LEAST_SUM = 1e-26
"""Of exponentials, in which what counts of a sum over a million of them is no subnormal number."""


def cross_entropy(
    x_BxLxD: jax.Array,
    embedding_VxD: jax.Array,
    bias_V: jax.Array | None,
    targets_BxL: jax.Array,
    *,
    cap: float | None = None,
    normalizer: bool = False,
    chunk: int | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Arguments as in `lm.ops.cross_entropy`."""
    chunk = _chunk(chunk, targets_BxL.shape, embedding_VxD.shape[0])
    nats = _per_device(functools.partial(_nats, chunk, cap, normalizer), (True, False, False, True), targets_BxL)
    return nats(x_BxLxD, embedding_VxD, bias_V, targets_BxL)


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
) -> tuple[jax.Array, jax.Array]:
    """Arguments as in `lm.ops.cross_entropy`."""
    chunk = _chunk(chunk, targets_BxL.shape, embedding_VxD.shape[0])
    run = _per_device(functools.partial(_weighted, chunk, cap, z_loss), (True, False, False, True, True), targets_BxL)
    total_Px1, nats_BxL = run(x_BxLxD, embedding_VxD, bias_V, targets_BxL, weights_BxL)
    return total_Px1, lax.stop_gradient(nats_BxL)


def unsupported(*args, **options) -> None:
    """Everything is supported."""


def _chunk(chunk: int | None, shape: tuple[int, int], vocabulary: int) -> int:
    """Positions a chunk."""
    (batch, length), target = shape, platform.target_platform()
    if chunk is None:
        tokens = LOGIT_BYTES.get(target, 2**28) // (vocabulary * 4)
        rows = -(-batch // platform.batch_shards())
        chunk = max(1, (min(tokens, CPU_TOKENS) if target == 'cpu' else tokens) // rows)
    return even_block(length, chunk)


def _per_device(function: Callable, split: tuple[bool, ...], targets_BxL: jax.Array) -> Callable:
    return platform.per_device(function, split) if targets_BxL.shape[0] % platform.batch_shards() == 0 else function


def _logits(x_BxCxD: jax.Array, embedding_VxD: jax.Array, bias_V: jax.Array | None, cap: float | None) -> jax.Array:
    logits_BxCxV = dot('bcd,vd->bcv', x_BxCxD, embedding_VxD)
    return capped(logits_BxCxV if bias_V is None else logits_BxCxV + bias_V.astype(jnp.float32), cap)


def _log_normalizers(logits_BxCxV: jax.Array) -> jax.Array:
    """log Σ_v exp(logit_v), [B, C].

    A sum that no maximum precedes is formed by the product that makes the logits: a pass over them less. Where one
    leaves the range of float32, all are formed again, with their maxima.
    """
    sum_BxC = jnp.exp(logits_BxCxV).sum(-1)
    precise = ((sum_BxC > LEAST_SUM) & (sum_BxC < jnp.inf)).all()
    return lax.cond(precise, lambda: jnp.log(sum_BxC), lambda: jax.nn.logsumexp(logits_BxCxV, axis=-1))


def _losses(logits_BxCxV: jax.Array, targets_BxC: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Nats, and the log-normalizers."""
    total_BxC = _log_normalizers(logits_BxCxV)
    return total_BxC - jnp.take_along_axis(logits_BxCxV, targets_BxC[..., None], -1)[..., 0], total_BxC


def _logit_gradients(logits_BxCxV, *rest) -> tuple[jax.Array, jax.Array]:
    """The gradient of the logits twice, for the two products that take it.

    On TPUs each product forms its own from the logits while it runs: one for both would be written to memory, on all
    chips but v5e.
    """
    first_BxCxV = _logit_gradient(logits_BxCxV, *rest)
    if platform.target_platform() != 'tpu':
        return first_BxCxV, first_BxCxV
    return first_BxCxV, _logit_gradient(lax.optimization_barrier(logits_BxCxV), *rest)


def _logit_gradient(logits_BxCxV, total_BxC, targets_BxC, dnats_BxC, dtotal_BxC, cap) -> jax.Array:
    """That of the logits before their cap, from those of the losses and, if not None, of the log-normalizers."""
    weight_BxCxV = jnp.exp(logits_BxCxV - total_BxC[..., None])
    target_BxCxV = targets_BxC[..., None] == jnp.arange(logits_BxCxV.shape[-1])
    dlogits_BxCxV = jnp.where(target_BxCxV, weight_BxCxV - 1.0, weight_BxCxV) * dnats_BxC[..., None]
    if dtotal_BxC is not None:
        dlogits_BxCxV += weight_BxCxV * dtotal_BxC[..., None]
    return dlogits_BxCxV if cap is None else dlogits_BxCxV * capped_slope(logits_BxCxV, cap)


def _no_gradients(x_BxLxD, embedding_VxD, bias_V):
    """Of x, the embedding and the bias, to be filled by `_added`."""
    dbias_V = None if bias_V is None else jnp.zeros(bias_V.shape, jnp.float32)
    return jnp.zeros_like(x_BxLxD), jnp.zeros(embedding_VxD.shape, jnp.float32), dbias_V


def _added(gradients, dlogits, x_BxCxD, weights_VxD, i, chunk):
    """The gradients with those of chunk i; what of it the chunk before has had, too, counts once. `dlogits`: what
    `_logit_gradients` gives."""
    dx_BxLxD, dembedding_VxD, dbias_V = gradients
    length = dx_BxLxD.shape[1]
    for_x_BxCxV, dlogits_BxCxV = (a.astype(dx_BxLxD.dtype) for a in dlogits)
    dx_BxCxD = dot('bcv,vd->bcd', for_x_BxCxV, weights_VxD)
    dx_BxLxD = put(dx_BxLxD, dx_BxCxD, start(i, chunk, length), 1)
    if length % chunk:
        x_BxCxD = jnp.where(fresh(i, chunk, length)[:, None], x_BxCxD, 0)
    dembedding_VxD += dot('bcv,bcd->vd', dlogits_BxCxV, x_BxCxD)
    if dbias_V is not None:
        fresh_C = fresh(i, chunk, length).astype(dlogits_BxCxV.dtype)
        dbias_V += jnp.einsum('bcv,c->v', dlogits_BxCxV, fresh_C, preferred_element_type=jnp.float32)
    return dx_BxLxD, dembedding_VxD, dbias_V


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _nats(chunk, cap, normalizer, x_BxLxD, embedding_VxD, bias_V, targets_BxL):
    return _forward(chunk, cap, normalizer, x_BxLxD, embedding_VxD, bias_V, targets_BxL)[0]


def _forward(chunk, cap, normalizer, x_BxLxD, embedding_VxD, bias_V, targets_BxL):
    length = targets_BxL.shape[1]
    weights_VxD = embedding_VxD.astype(x_BxLxD.dtype)

    def one_chunk(i, outputs):
        at = start(i, chunk, length)
        logits_BxCxV = _logits(take(x_BxLxD, at, chunk, 1), weights_VxD, bias_V, cap)
        found = _losses(logits_BxCxV, take(targets_BxL, at, chunk, 1))
        return tuple(put(x_BxL, x_BxC, at, 1) for x_BxL, x_BxC in zip(outputs, found, strict=True))

    zeros_BxL = jnp.zeros(targets_BxL.shape, jnp.float32)
    n_chunks = -(-length // chunk)
    nats_BxL, total_BxL = loop(0, n_chunks, one_chunk, (zeros_BxL, zeros_BxL), n_chunks == 1)
    results = (nats_BxL, total_BxL) if normalizer else nats_BxL
    return results, (x_BxLxD, embedding_VxD, bias_V, targets_BxL, total_BxL)


def _backward(chunk, cap, normalizer, residuals, cotangents):
    dnats_BxL, dtotal_BxL = cotangents if normalizer else (cotangents, None)
    x_BxLxD, embedding_VxD, bias_V, targets_BxL, total_BxL = residuals
    length = targets_BxL.shape[1]
    weights_VxD = embedding_VxD.astype(x_BxLxD.dtype)

    def one_chunk(i, gradients):
        at = start(i, chunk, length)
        x_BxCxD = take(x_BxLxD, at, chunk, 1)
        each = (total_BxL, targets_BxL, dnats_BxL, dtotal_BxL)
        each = (None if x_BxL is None else take(x_BxL, at, chunk, 1) for x_BxL in each)
        dlogits = _logit_gradients(_logits(x_BxCxD, weights_VxD, bias_V, cap), *each, cap)
        return _added(gradients, dlogits, x_BxCxD, weights_VxD, i, chunk)

    n_chunks = -(-length // chunk)
    gradients = loop(0, n_chunks, one_chunk, _no_gradients(x_BxLxD, embedding_VxD, bias_V), n_chunks == 1)
    return *_as_parameters(gradients, embedding_VxD, bias_V), None


def _as_parameters(gradients, embedding_VxD, bias_V):
    dx_BxLxD, dembedding_VxD, dbias_V = gradients
    dbias_V = None if bias_V is None else dbias_V.astype(bias_V.dtype)
    return dx_BxLxD, dembedding_VxD.astype(embedding_VxD.dtype), dbias_V


_nats.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _weighted(chunk, cap, z_loss, x_BxLxD, embedding_VxD, bias_V, targets_BxL, weights_BxL):
    """The sum, [1, 1], and the nats; the gradient of these is left out."""
    nats_BxL, total_BxL = _nats(chunk, cap, True, x_BxLxD, embedding_VxD, bias_V, targets_BxL)
    return _sum(weights_BxL, nats_BxL, total_BxL, z_loss)[0], nats_BxL


def _sum(weights_BxL, nats_BxL, total_BxL, z_loss):
    """The sum, [1, 1], and what of it each weight is multiplied by."""
    losses_BxL = nats_BxL + z_loss * total_BxL**2 if z_loss else nats_BxL
    counted_BxL = weights_BxL != 0.0  # what does not count may be NaN
    return jnp.sum(weights_BxL * losses_BxL, where=counted_BxL, keepdims=True), losses_BxL


def _weighted_forward(chunk, cap, z_loss, x_BxLxD, embedding_VxD, bias_V, targets_BxL, weights_BxL):
    length = targets_BxL.shape[1]
    weights_VxD = embedding_VxD.astype(x_BxLxD.dtype)

    def one_chunk(i, carry):
        outputs, gradients = carry
        at = start(i, chunk, length)
        x_BxCxD, targets_BxC, weights_BxC = (take(x, at, chunk, 1) for x in (x_BxLxD, targets_BxL, weights_BxL))
        logits_BxCxV = _logits(x_BxCxD, weights_VxD, bias_V, cap)
        nats_BxC, total_BxC = _losses(logits_BxCxV, targets_BxC)
        outputs = tuple(put(*pair, at, 1) for pair in zip(outputs, (nats_BxC, total_BxC), strict=True))
        dtotal_BxC = 2.0 * z_loss * total_BxC * weights_BxC if z_loss else None
        dlogits = _logit_gradients(logits_BxCxV, total_BxC, targets_BxC, weights_BxC, dtotal_BxC, cap)
        return outputs, _added(gradients, dlogits, x_BxCxD, weights_VxD, i, chunk)

    zeros_BxL = jnp.zeros(targets_BxL.shape, jnp.float32)
    n_chunks = -(-length // chunk)
    empty = ((zeros_BxL, zeros_BxL), _no_gradients(x_BxLxD, embedding_VxD, bias_V))
    (nats_BxL, total_BxL), gradients = loop(0, n_chunks, one_chunk, empty, n_chunks == 1)
    sum_1x1, losses_BxL = _sum(weights_BxL, nats_BxL, total_BxL, z_loss)
    return (sum_1x1, nats_BxL), (_as_parameters(gradients, embedding_VxD, bias_V), losses_BxL)


def _weighted_backward(chunk, cap, z_loss, residuals, cotangents):
    gradients, losses_BxL = residuals
    factor = cotangents[0][0, 0]
    scaled = jax.tree.map(lambda gradient: (factor * gradient).astype(gradient.dtype), gradients)
    return *scaled, None, factor * losses_BxL


_weighted.defvjp(_weighted_forward, _weighted_backward)
