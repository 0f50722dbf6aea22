"""Causal linear attention on Hopper GPUs, with or without decay: fused Mosaic GPU kernels, forward and backward.

A thread block walks over the tokens of a head, tile by tile, with the sums over the keys of some of the features in
registers; the denominators and numerators of many such slices are added. Features of which there are few are arrays;
those of an `ElementwiseMap` are made on chip, and never reach the GPU's memory.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from lm.ops import decay as decays
from lm.ops import platform
from lm.ops.linear_attention import expansion
from lm.ops.linear_attention.gpu.recurrent.plan import CHUNK, RecurrentPlan
from lm.ops.linear_attention.types import ElementwiseMap, LinearCall, LinearResult, Options
from lm.ops.residuals import saved

TILE = 64
WIDEST = 64
"""Size of heads, and of vectors of which the kernels make features: others are padded to it with zeros."""
MOST_GIVEN = 512
"""Features that go through the GPU's memory."""
BUSY = 132
"""Thread blocks."""
SHORTEST = 1024
"""Tokens of a segment."""


def linear_attention(call: LinearCall) -> LinearResult:
    """Computes the call, which `unsupported` must not refuse."""
    options, (batch, length, heads, _) = call.options, call.q_BxLxHxE.shape
    features, decay = _count(options, call.k_parameters, call.k_BxLxKxE), call.log_decay_BxLxK is not None
    made = features > MOST_GIVEN
    plan = RecurrentPlan(
        *pieces(features, batch // platform.batch_shards() * heads, length, decay),
        normalize=options.normalize,
        decay=decay,
        feature_map=options.feature_map if made else None,
        interpreted=platform.target_platform() != 'gpu',
    )
    q, k, rows = call.q_BxLxHxE, call.k_BxLxKxE, None
    if made:
        rows = options.feature_map.rows(call.k_parameters)
    else:
        dtype = call.v_BxLxKxD.dtype
        q = _features(options, call.q_parameters, q, queries=True).astype(dtype)
        k = _features(options, call.k_parameters, k, queries=False).astype(dtype)
    function = functools.partial(_by_head, plan, options)
    function = platform.per_device(function, split=(True, True, True, True, False))
    return LinearResult(function(q, k, call.v_BxLxKxD, call.log_decay_BxLxK, rows), None)


def unsupported(call: LinearCall) -> str | None:
    """Returns why the kernels cannot compute this call, or None."""
    options, q, k, v = call.options, call.q_BxLxHxE, call.k_BxLxKxE, call.v_BxLxKxD
    if reason := platform.without_mosaic_gpu():
        return reason
    if not options.causal:
        return 'is causal only'
    if options.local is not None:
        return 'has no exact kernel'
    if call.initial_state is not None or call.with_state:
        return 'takes no state in and gives none out'
    if v.dtype != jnp.bfloat16:
        return f'takes values that are bfloat16, not {v.dtype}'
    if v.shape[-1] > WIDEST:
        return f'takes heads of up to {WIDEST}, not {v.shape[-1]}'
    if (count := _count(options, call.k_parameters, k)) > MOST_GIVEN:
        if not isinstance(options.feature_map, ElementwiseMap) or tuple(options.powers) != (0.0, 1.0):
            return f'takes up to {MOST_GIVEN} features, not {count}'
        if q.dtype != jnp.bfloat16 or k.dtype != jnp.bfloat16 or q.shape[-1] > WIDEST or count % CHUNK:
            return f'makes multiples of {CHUNK} features of bfloat16 vectors of up to {WIDEST}'
        if any(a is not b for a, b in zip(*map(jax.tree.leaves, call.parameters), strict=True)):
            return 'makes features of queries and keys by the same parameters'
    return platform.uneven_batch(q.shape[0])


def _count(options: Options, parameters: Any, k_BxLxKxE: jax.Array) -> int:
    """Features, powers and all."""
    one = jax.ShapeDtypeStruct((1, 1, *k_BxLxKxE.shape[2:]), k_BxLxKxE.dtype)
    size = jax.eval_shape(lambda parameters, k: options.compute_features(parameters, k, False), parameters, one).shape[
        -1
    ]
    return sum(len(w) for w in expansion.weights(options.powers, size))


def pieces(features: int, heads: int, length: int, decay: bool) -> tuple[int, int, int]:
    """(segments, slices, chunks of a slice) that keep a GPU busy, and are long enough to be worth their sums.

    Two chunks a slice halve what slices write. Their sums fit the registers where accumulators hold them.
    """
    chunks = -(-features // CHUNK)
    if chunks % 2 == 0 and not decay and heads * chunks // 2 >= BUSY:
        return 1, chunks // 2, 2
    segments = 1
    while heads * chunks * segments < BUSY and length // (2 * segments) >= SHORTEST:
        segments *= 2
    return segments, chunks, 1


def _features(options: Options, parameters: Any, x_BxLxNxE: jax.Array, queries: bool) -> jax.Array:
    """[B, L, N, M]; the powers' weights are part of those of queries."""
    x_BxNxFxL = options.compute_features(parameters, x_BxLxNxE, queries).transpose(0, 2, 3, 1)
    pieces, _ = expansion.expand(options.powers, x_BxNxFxL)
    if queries:
        weights = expansion.weights(options.powers, x_BxNxFxL.shape[2])
        pieces = [piece * w[:, None] for piece, w in zip(pieces, weights, strict=True)]
    return jnp.concatenate(pieces, axis=2).transpose(0, 3, 1, 2)


def _by_head(plan: RecurrentPlan, options: Options, q_BxLxHxE, k_BxLxKxE, v_BxLxKxD, log_decay_BxLxK, rows_MxE):
    batch, length, heads, _ = q_BxLxHxE.shape
    step = TILE * plan.segments
    padded = -(-length // step) * step
    size = WIDEST if plan.feature_map is not None else plan.slices * plan.chunks * CHUNK

    def heads_apart(a_BxLxNxF, size):
        # Zero tokens after the last are exact: no query sees them. So are zero features.
        pad = ((0, 0), (0, padded - length), (0, 0), (0, size - a_BxLxNxF.shape[3]))
        a_BxHxLxF = jnp.repeat(jnp.pad(a_BxLxNxF, pad).swapaxes(1, 2), heads // a_BxLxNxF.shape[2], axis=1)
        return a_BxHxLxF.reshape(batch * heads * plan.segments, padded // plan.segments, size)

    rows = () if rows_MxE is None else _in_two(jnp.pad(rows_MxE, ((0, 0), (0, WIDEST - rows_MxE.shape[1]))))

    def side(x_BxLxNxF, queries):
        x_NxLxF = heads_apart(x_BxLxNxF, size)
        if not rows:
            return (x_NxLxF.reshape(*x_NxLxF.shape[:2], -1, CHUNK).swapaxes(1, 2),)
        shift_NxL = plan.feature_map.shift(x_NxLxF.astype(jnp.float32), queries)
        return x_NxLxF, saved(_largest(x_NxLxF, rows[0])) if shift_NxL is None else shift_NxL

    q, k = side(q_BxLxHxE, True), side(k_BxLxKxE, False)
    decay = None if log_decay_BxLxK is None else heads_apart(log_decay_BxLxK[..., None], 1)[..., 0]
    rows = tuple(w.reshape(-1, CHUNK, WIDEST) for w in rows)
    o_NxLxD = _attend(plan, options.denominator_bias, q, k, rows, heads_apart(v_BxLxKxD, WIDEST), decay)
    o_BxHxLxD = o_NxLxD.reshape(batch, heads, padded, WIDEST)[:, :, :length, : v_BxLxKxD.shape[-1]]
    return o_BxHxLxD.swapaxes(1, 2)


def _in_two(w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two bfloat16 arrays whose sum is w to 16 bits."""
    # Not a cast there and back, which XLA may leave out.
    high = jax.lax.reduce_precision(w, exponent_bits=8, mantissa_bits=7)
    return high.astype(jnp.bfloat16), (w - high).astype(jnp.bfloat16)


@jax.jit
def _largest(x_NxLxE, w_MxE):
    from lm.ops.linear_attention.gpu.recurrent.largest import largest

    return largest(*jax.lax.stop_gradient((x_NxLxE, w_MxE)))


def _running(log_decay_NxL: jax.Array) -> jax.Array:
    """The sums of the logs from the start of a tile to after each token."""
    return decays.in_tile(log_decay_NxL.reshape(log_decay_NxL.shape[0], -1, TILE)).reshape(log_decay_NxL.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(plan, bias, *inputs):
    """Of queries and keys, tuples of arrays as in `Features`, rows, v [N, L, D] and log factors [N, L] or None."""
    return _forward(plan, bias, *inputs)[0]


# Compiled as one function, which all layers share: lowering the kernels takes seconds.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward(plan, bias, queries, keys, rows, v, log_decay):
    """Outputs, inverse denominators, and the sums before each segment."""
    # Mosaic GPU takes half a second to import, and only runs that use it shall wait for it.
    from lm.ops.linear_attention.gpu.recurrent.forward import outputs, sums

    more = () if log_decay is None else (_running(log_decay),)
    before = _outside(plan, sums(plan, keys, rows, v, *more), more) if plan.segments > 1 else ()
    num, *den = (a.sum(axis=0) for a in outputs(plan, queries, keys, rows, v, *more, *before))
    if not den:
        return num.astype(v.dtype), None, before
    total = den[0] + bias
    # Padding after the last token has no keys and, with denominator_bias 0, no denominator either.
    inverse = jnp.where(total == 0.0, 0.0, 1.0 / total)
    return (num * inverse[..., None]).astype(v.dtype), inverse, before


def _outside(plan: RecurrentPlan, sums: list[jax.Array], running: tuple, later: bool = False) -> tuple[jax.Array, ...]:
    """The sums over all segments before each, or after it, from those of the segments [N, …]."""
    order = -1 if later else 1
    logs = 0.0
    if running:
        logs = running[0][:, TILE - 1 :: TILE].sum(axis=1)

    def segments(a):
        return a.reshape(-1, plan.segments, *a.shape[1:])[:, ::order]

    # Entry (i, j): the factor of sums as of the end of segment j at the start of segment i, j before i.
    after = jnp.cumsum(segments(jnp.broadcast_to(logs, sums[0].shape[:1])), axis=1)
    before = jnp.pad(after, ((0, 0), (1, 0)))[:, :-1]
    earlier = jnp.tri(plan.segments, k=-1, dtype=bool)
    factors = jnp.exp(jnp.where(earlier, before[:, :, None] - after[:, None, :], -jnp.inf))

    def over(a):
        total = jnp.einsum('nij,nj...->ni...', factors, segments(a), precision='highest')
        return total[:, ::order].reshape(a.shape)

    return tuple(map(over, sums))


def _attend_forward(plan, bias, *inputs):
    o, inverse, before = _forward(plan, bias, *inputs)
    # The layer's own backward pass wants outputs, too.
    o, before = saved(o), tuple(map(saved, before))
    return o, (inputs, *((o, saved(inverse)) if plan.normalize else (None, None)), before)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _attend_backward(plan, bias, residuals, do):
    from lm.ops.linear_attention.gpu.recurrent.backward import key_gradients, query_gradients
    from lm.ops.linear_attention.gpu.recurrent.forward import sums

    (queries, keys, rows, v, log_decay), o, inverse, before = residuals
    tokens, g = [], do
    if plan.normalize:
        do = do.astype(jnp.float32)
        tokens.append(-inverse * jnp.sum(do * o.astype(jnp.float32), axis=-1))
        g = do * inverse[..., None]
    running = () if log_decay is None else (_running(log_decay),)
    tokens += running
    g = g.astype(v.dtype)
    after = ()
    if plan.segments > 1:
        after = _outside(plan, sums(plan, queries, rows, g, *tokens, backwards=True), running, later=True)
    dqueries = query_gradients(plan, queries, keys, rows, v, g, *tokens, *before)
    *dkeys, dv = key_gradients(plan, queries, keys, rows, v, g, *tokens, *after)
    dlog_decay = None
    if log_decay is not None:
        (*dqueries, met), (*dkeys, met_by) = dqueries, dkeys
        whole = (-1, plan.segments * v.shape[1])
        resets = (log_decay < decays.RESET).reshape(1, *whole)
        dlog_decay = decays.backwards((met - met_by).sum(axis=0).reshape(1, *whole), resets).reshape(log_decay.shape)

    if plan.feature_map is not None:
        (dq, *dqueries), (dk, *dkeys) = ([a.sum(axis=0) for a in side] for side in (dqueries, dkeys))
        dqueries, dkeys = (dq.astype(v.dtype), *dqueries), (dk.astype(v.dtype), *dkeys)
    drows = jax.tree.map(jnp.zeros_like, rows)
    return tuple(dqueries), tuple(dkeys), drows, dv.sum(axis=0).astype(v.dtype), dlog_decay


_attend.defvjp(_attend_forward, _attend_backward)
