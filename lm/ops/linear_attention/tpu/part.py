"""The TPU kernels on windows that are split over devices: those of a whole window, with sums from before and after.

Forward, a kernel folds the keys of this part, the sums of all parts before come of a logarithmic number of exchanges
(`lm.ops.linear_attention.parts.carried`), and the forward kernel starts from them. Backward is the mirror image: the
same kernel folds the queries of this part, with what the gradients of their outputs say to earlier keys, the exchange
runs the other way, and the backward kernel starts from what the parts after this one have sent.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lm.ops import decay as decays
from lm.ops import platform
from lm.ops.linear_attention.parts import carried
from lm.ops.linear_attention.tpu import attention
from lm.ops.linear_attention.tpu.backward import backward
from lm.ops.linear_attention.tpu.features import TpuPlan, expand, moment_operand, state_operand
from lm.ops.linear_attention.tpu.fold import fold
from lm.ops.linear_attention.tpu.forward import forward
from lm.ops.linear_attention.types import Options
from lm.ops.residuals import saved
from lm.ops.tpu import ROWS, by_head
from lm.ops.tpu.decay import times


class Factors(NamedTuple):
    """What the part's tokens count for beyond its ends; no gradient flows to them, `attend` gives it to the running
    sums."""

    keys_BxKxL: jax.Array
    """Of each key at the part's end; 0 where there is none."""
    queries_BxKxL: jax.Array | None
    """Of the sums before the part, for each query; None: no decay."""
    log_whole_BxK: jax.Array | None
    """The log factor from the part's first token to its last; None: no decay."""


def linear_attention(
    q_BxLxHxE: jax.Array,
    k_BxLxKxE: jax.Array,
    v_BxLxKxD: jax.Array,
    q_parameters: Any,
    k_parameters: Any,
    q_local_BxLxHxC: jax.Array | None,
    k_local_BxLxKxC: jax.Array | None,
    initial_state: None,
    log_decay_BxLxK: jax.Array | None,
    *,
    options: Options,
) -> jax.Array:
    """As `lm.ops.linear_attention.parts.linear_attention`; calls that `unsupported` refuses are wrong here."""
    arrays = [log_decay_BxLxK, q_BxLxHxE, k_BxLxKxE, v_BxLxKxD]
    if options.local is not None:
        arrays += [q_local_BxLxHxC, k_local_BxLxKxC]
    parameters = None if options.feature_map is None else (q_parameters, k_parameters)
    function = platform.per_device(functools.partial(_by_head, options), split=(False,) + (True,) * len(arrays))
    return function(parameters, *arrays)


def unsupported(*arrays, options) -> str | None:
    """Why the kernels cannot compute this call, or None."""
    return attention.unsupported(*arrays, options=options, part=True)


def _by_head(options: Options, parameters, log_decay_BxLxK, q_BxLxHxE, k_BxLxKxE, v_BxLxKxD, *local) -> jax.Array:
    arrays = (log_decay_BxLxK, q_BxLxHxE, k_BxLxKxE, v_BxLxKxD, *local)
    plan, maps, x, y, v, *local = attention.arranged(options, parameters, *arrays, part=True)
    factors = _factors(log_decay_BxLxK, k_BxLxKxE.shape, v.shape[-1])
    return by_head(attend(plan, x, y, v, maps, factors, *local), q_BxLxHxE, v_BxLxKxD.shape[-1])


def _factors(log_decay_BxLxK: jax.Array | None, shape: tuple[int, ...], padded: int) -> Factors:
    batch, length, heads = shape[:3]
    if log_decay_BxLxK is None:
        return Factors(jnp.broadcast_to((jnp.arange(padded) < length) * 1.0, (batch, heads, padded)), None, None)
    decay = decays.accumulate(jax.lax.stop_gradient(log_decay_BxLxK))
    first, each, last = (decays.entries(decay, *ends) for ends in ((0, 1), (1,), (length,)))
    pairs = (decays.between(last, each), decays.between(each, first))
    keys, queries = (jnp.pad(jnp.exp(g), ((0, 0), (0, 0), (0, padded - length))) for g in pairs)
    return Factors(keys, queries, decays.between(last, first)[..., 0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    plan: TpuPlan, x, y, v: jax.Array, maps: tuple[jax.Array, ...], factors: Factors, *local: jax.Array
) -> jax.Array:
    """The kernels on the arrays of `lm.ops.linear_attention.tpu.attention.attend`, which are a part of a window."""
    return _forward(plan, False, x, y, v, maps, factors, *local)[0][0]


def _forward(plan, save, x, y, v, maps, factors, *local):
    read = attention.operands(maps, x, y, v)
    own = [saved(a) for a in _own(plan, y, v, factors, read[1:])]
    met = _met(plan, x.shape[1], v.shape[1])
    _, pull, before = jax.vjp(functools.partial(_before, met), own, factors.log_whole_BxK, has_aux=True)
    groups = x.shape[0] // math.prod(factors.keys_BxKxL.shape[:2])
    before = [jnp.repeat(a, groups, axis=1).reshape(-1, *a.shape[2:]) for a in before]
    return forward(plan, save, x, y, v, read, *local, before=before), (read, own, pull)


def _own(plan, y, v, factors, read):
    """The sums over the keys of this part as of its end, [B, K, rows, columns]."""
    batch, heads, length = factors.keys_BxKxL.shape
    groups, w_Nx1xL = v.shape[0] // (batch * heads), factors.keys_BxKxL.reshape(-1, 1, length)
    y, v = y[::groups], v[::groups]
    sums = fold(plan, False, y, times(v, w_Nx1xL) if plan.decay else v, w_Nx1xL, read)
    return [a.reshape(batch, heads, *a.shape[1:]) for a in sums]


def _before(met, own, log_whole_BxK):
    """The sums before this part as queries meet them, and as they are."""
    before = carried(own, log_whole_BxK)
    return [a * factor for a, factor in zip(before, met, strict=True)], before


def _met(plan: TpuPlan, features: int, head_dim: int) -> list[jax.Array]:
    """By what the kernels multiply each number of the sums when they read it."""
    if not plan.squared:
        # The rows below the values are all the same and count once.
        return [jnp.where(jnp.arange(head_dim + ROWS) < head_dim, 1.0, 1.0 / ROWS)[:, None]]
    one_Fx1 = jnp.ones((features, 1), jnp.float32)
    ones = [jnp.ones(shape, jnp.float32) for shape in plan.sums_shapes(features, head_dim)[1:]]
    return [
        state_operand(plan, expand(plan, one_Fx1, weighted=True).T, features, jnp.float32),
        *(moment_operand(plan, each, jnp.float32) for each in ones),
    ]


def _attend_forward(plan, x, y, v, maps, factors, *local):
    results, (read, own, pull) = _forward(plan, True, x, y, v, maps, factors, *local)
    o, inverse, *sums = map(saved, results)
    return o, ((x, y, v, *local), read, maps, factors, own if plan.decay else None, pull, o, inverse, sums)


def _attend_backward(plan, residuals, do):
    inputs, read, maps, factors, own, pull, o, inverse, sums = residuals
    (x, _, v, *_), (batch, heads, length) = inputs, factors.keys_BxKxL.shape
    groups = v.shape[0] // (batch * heads)
    e_Nx1xL = jnp.zeros_like(inverse)
    if plan.normalize:
        e_Nx1xL = -inverse * jnp.sum(do.astype(jnp.float32) * o.astype(jnp.float32), axis=1, keepdims=True)
    g_NxDxL = do.astype(jnp.float32) * inverse
    if plan.decay:
        read_Nx1xL = jnp.repeat(factors.queries_BxKxL, groups, axis=1).reshape(-1, 1, length)
        g_NxDxL, e_Nx1xL = g_NxDxL * read_Nx1xL, e_Nx1xL * read_Nx1xL
    to_earlier = fold(plan, True, x, g_NxDxL.astype(v.dtype), e_Nx1xL, read[:1])
    dmet = [a.reshape(batch, heads, groups, *a.shape[1:]).sum(2) for a in to_earlier]
    down, dlog_BxK = pull(dmet)
    met = _met(plan, x.shape[1], v.shape[1])
    after = [jnp.where(factor == 0.0, 0.0, a / factor) for a, factor in zip(down, met, strict=True)]
    # The kernels' gradients of keys are summed over the heads that share them: one of these takes all.
    first = [jnp.pad(a[:, :, None], [(0, 0), (0, 0), (0, groups - 1), (0, 0), (0, 0)]) for a in after]
    after = [a.reshape(-1, *a.shape[3:]) for a in first]
    (dx, dy, dv, *dlocal), dmaps = backward(plan, read, inputs, o, do, inverse, sums, after)
    if plan.decay:
        # What later parts read of this one, and through it, has faded with all of its tokens after the last reset.
        dlast_BxK = dlog_BxK + sum((a * d).sum((2, 3)) for a, d in zip(own, down, strict=True))
        dc_BxKxGxL = jnp.where(jnp.arange(length) < plan.part, dlocal[-1], 0.0).reshape(batch, heads, groups, length)
        dlocal[-1] = dc_BxKxGxL.at[:, :, 0, plan.part - 1].add(dlast_BxK).reshape(-1, 1, length)
    return dx, dy, dv, attention.of_maps(maps, dmaps), None, *dlocal


attend.defvjp(_attend_forward, _attend_backward)
