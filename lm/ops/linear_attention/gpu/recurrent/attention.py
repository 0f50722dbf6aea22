"""Causal linear attention on Hopper GPUs, with or without decay: fused Mosaic GPU kernels, forward and backward.

A thread block walks over the tokens of a head, tile by tile. It holds the sums over the keys of some of the features in
registers, and the denominators and numerators of many such slices are added. A small number of features are arrays;
the features of an `ElementwiseMap` are made on chip and never reach the GPU's memory.
"""

import dataclasses
import functools
from typing import cast

import jax
import jax.numpy as jnp

from lm.ops import decay as decays
from lm.ops import platform
from lm.ops.custom_vjp import custom_vjp
from lm.ops.dots import in_parts
from lm.ops.linear_attention import expansion
from lm.ops.linear_attention.feature_maps import ElementwiseMap
from lm.ops.linear_attention.gpu.recurrent.plan import CHUNK, RecurrentArrays, RecurrentPlan, SegmentSums, SideArrays
from lm.ops.linear_attention.types import LinearCall, LinearResult, Options
from lm.ops.linear_attention.xla import count_features
from lm.ops.residuals import save_residual

TILE = 64
WIDEST = 64
"""Size of heads, and of the vectors that become features in the kernels: smaller ones are padded with zeros."""
MOST_GIVEN = 512
"""The most features that go through the GPU's memory."""
BUSY = 132
"""Thread blocks."""
SHORTEST = 1024
"""Tokens of a segment."""

Inputs = RecurrentArrays[jax.Array]


def linear_attention(call: LinearCall) -> LinearResult:
    """Computes the call, which `unsupported` must not refuse."""
    options, (batch, length, heads, _) = call.options, call.q_BxLxHxE.shape
    features, decay = _count_features(call), call.log_decay_BxLxK is not None
    feature_map = cast(ElementwiseMap, options.feature_map) if features > MOST_GIVEN else None
    segments, slices, chunks = choose_pieces(features, batch // platform.batch_shards() * heads, length, decay)
    plan = RecurrentPlan(
        heads=heads,
        segments=segments,
        slices=slices,
        chunks=chunks,
        normalize=options.normalize,
        denominator_bias=options.denominator_bias,
        decay=decay,
        feature_map=feature_map,
    )
    rows = None
    if feature_map is not None:
        rows = feature_map.rows(call.k_parameters)
    else:
        dtype = call.v_BxLxKxD.dtype
        q = _compute_features(options, call.q_parameters, call.q_BxLxHxE, queries=True).astype(dtype)
        k = _compute_features(options, call.k_parameters, call.k_BxLxKxE, queries=False).astype(dtype)
        call = dataclasses.replace(call, q_BxLxHxE=q, k_BxLxKxE=k)
    call = dataclasses.replace(call, q_parameters=None, k_parameters=None)
    function = platform.per_device(functools.partial(_attend_on_device, plan), split=(True, False))
    return LinearResult(function(call, rows), None)


def unsupported(call: LinearCall) -> str | None:
    """Returns why the kernels cannot compute this call, or None."""
    options, q, k, v = call.options, call.q_BxLxHxE, call.k_BxLxKxE, call.v_BxLxKxD
    if reason := platform.without_mosaic_gpu():
        return reason
    if call.channel_log_decay_BxLxKxE is not None:
        return 'takes one factor per token and head, not one per key channel'
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
    if (count := _count_features(call)) > MOST_GIVEN:
        if not isinstance(options.feature_map, ElementwiseMap) or tuple(options.powers) != (0.0, 1.0):
            return f'takes up to {MOST_GIVEN} features, not {count}'
        if q.dtype != jnp.bfloat16 or k.dtype != jnp.bfloat16 or q.shape[-1] > WIDEST or count % CHUNK:
            return f'makes multiples of {CHUNK} features of bfloat16 vectors of up to {WIDEST}'
        if any(a is not b for a, b in zip(*map(jax.tree.leaves, call.parameters), strict=True)):
            return 'makes features of queries and keys by the same parameters'
    return platform.uneven_batch(q.shape[0])


def _count_features(call: LinearCall) -> int:
    """Counts features, with all powers."""
    features = count_features(call.options, call.k_parameters, call.k_BxLxKxE)
    return sum(len(w) for w in expansion.weights(call.options.powers, features))


def choose_pieces(features: int, heads: int, length: int, decay: bool) -> tuple[int, int, int]:
    """Chooses the numbers of segments and slices, and of chunks per slice.

    They keep a GPU busy, and segments are long enough to be worth their sums.

    Two chunks per slice halve what slices write. Their sums fit the registers where accumulators hold them.
    """
    chunks = -(-features // CHUNK)
    if chunks % 2 == 0 and not decay and heads * chunks // 2 >= BUSY:
        return 1, chunks // 2, 2
    segments = 1
    while heads * chunks * segments < BUSY and length // (2 * segments) >= SHORTEST:
        segments *= 2
    return segments, chunks, 1


def _compute_features(options: Options, parameters: object, x_BxLxNxE: jax.Array, queries: bool) -> jax.Array:
    """Computes features [B, L, N, M]; the powers' weights are the queries' part."""
    x_BxNxFxL = options.compute_features(parameters, x_BxLxNxE, queries).transpose(0, 2, 3, 1)
    pieces, _ = expansion.expand(options.powers, x_BxNxFxL)
    if queries:
        weights = expansion.weights(options.powers, x_BxNxFxL.shape[2])
        pieces = [piece * w[:, None] for piece, w in zip(pieces, weights, strict=True)]
    return jnp.concatenate(pieces, axis=2).transpose(0, 3, 1, 2)


def _attend_on_device(plan: RecurrentPlan, call: LinearCall, rows_MxE: jax.Array | None) -> jax.Array:
    """Computes a call whose queries and keys are features, or inputs of the feature map."""
    batch, length, heads, _ = call.q_BxLxHxE.shape
    step = TILE * plan.segments
    padded = -(-length // step) * step
    size = WIDEST if plan.feature_map is not None else plan.slices * plan.chunks * CHUNK

    def pad(a_BxLxKxF, size):
        # Zero tokens after the last are exact: no query sees them. So are zero features.
        return jnp.pad(a_BxLxKxF, ((0, 0), (0, padded - length), (0, 0), (0, size - a_BxLxKxF.shape[3])))

    def join_heads(a_BxLxKxF):
        return a_BxLxKxF.reshape(batch, padded, -1)

    def split_heads(a_BxKxL):
        a_BxHxL = jnp.repeat(a_BxKxL, heads // a_BxKxL.shape[1], axis=1)
        return a_BxHxL.reshape(batch * heads * plan.segments, padded // plan.segments)

    rows = None
    if rows_MxE is not None:
        rows = in_parts(jnp.pad(rows_MxE, ((0, 0), (0, WIDEST - rows_MxE.shape[1]))), 2, in_kernel=False)

    def arrange(x_BxLxKxF, queries) -> SideArrays[jax.Array]:
        x_BxLxKxF = pad(x_BxLxKxF, size)
        if plan.feature_map is None or rows is None:
            return SideArrays(features=join_heads(x_BxLxKxF))
        shift_BxLxK = plan.feature_map.shift(x_BxLxKxF.astype(jnp.float32), queries)
        if shift_BxLxK is not None:
            shift_BxKxL = shift_BxLxK.swapaxes(1, 2)
        else:
            shift_BxKxL = save_residual(_find_largest(join_heads(x_BxLxKxF), rows[0])).reshape(batch, -1, padded)
        return SideArrays(vectors=join_heads(x_BxLxKxF), shifts=split_heads(shift_BxKxL))

    queries, keys = arrange(call.q_BxLxHxE, True), arrange(call.k_BxLxKxE, False)
    log_decay = call.log_decay_BxLxK
    log_decay = None if log_decay is None else split_heads(pad(log_decay[..., None], 1)[..., 0].swapaxes(1, 2))
    rows = jax.tree.map(lambda w: w.reshape(-1, CHUNK, WIDEST), rows)
    v_BxLxKD = join_heads(pad(call.v_BxLxKxD, WIDEST))
    o_BxLxHD = cast(jax.Array, _attend(plan, RecurrentArrays(queries, keys, rows, v_BxLxKD), log_decay))
    o_BxLxHxD = o_BxLxHD.reshape(batch, padded, heads, WIDEST)
    return o_BxLxHxD[:, :length, :, : call.v_BxLxKxD.shape[-1]]


@jax.jit
def _find_largest(x_BxLxKE: jax.Array, w_MxE: jax.Array) -> jax.Array:
    from lm.ops.linear_attention.gpu.recurrent.largest import find_largest

    return find_largest(*jax.lax.stop_gradient((x_BxLxKE, w_MxE)))


def _sum_in_tiles(log_decay_NxL: jax.Array) -> jax.Array:
    """Computes the sums of the logs from the start of a tile to after each token."""
    return decays.in_tile(log_decay_NxL.reshape(log_decay_NxL.shape[0], -1, TILE)).reshape(log_decay_NxL.shape)


@custom_vjp(0)
def _attend(plan: RecurrentPlan, inputs: Inputs, log_decay_NxT: jax.Array | None) -> jax.Array:
    """Returns outputs [B, L, H D]. N are all segments of all heads of all sequences, of T tokens each.

    The own side of `inputs` are queries; they have no gradients, running sums and sums.
    """
    return _forward(plan, inputs, log_decay_NxT)[0]


# It is compiled as one function, which all layers share: lowering the kernels takes seconds.
@functools.partial(jax.jit, static_argnums=0)
def _forward(
    plan: RecurrentPlan, inputs: Inputs, log_decay: jax.Array | None
) -> tuple[jax.Array, jax.Array | None, SegmentSums[jax.Array] | None]:
    """Computes outputs, inverse denominators, and the sums before each segment; None where the plan has none."""
    # Mosaic GPU takes half a second to import: only runs that use it wait for it.
    from lm.ops.linear_attention.gpu.recurrent.forward import invert_denominators, outputs, sum_segments

    t, before = None if log_decay is None else _sum_in_tiles(log_decay), None
    inputs = inputs._replace(t=t)
    if plan.segments > 1:
        keys = inputs._replace(own=cast(SideArrays, inputs.other), other=None)
        before = _sum_outside(plan, sum_segments(plan, keys), t)
    results = outputs(plan, inputs._replace(sums=before))
    num, inverse = jax.tree.map(lambda a: a.sum(axis=0), results)
    if inverse is not None and plan.slices > 1:
        inverse = invert_denominators(plan, inverse)
        num = _scale_vectors(plan, num, inverse)
    return num.astype(inputs.v.dtype), inverse, before


def _scale_vectors(plan: RecurrentPlan, x_BxLxHD: jax.Array, scale_NxT: jax.Array) -> jax.Array:
    """Multiplies the vector of each token and head by a number; float32."""
    batch, length, _ = x_BxLxHD.shape
    x_BxLxHxD = x_BxLxHD.reshape(batch, length, plan.heads, -1).astype(jnp.float32)
    scale_BxLxH = scale_NxT.reshape(batch, plan.heads, length).swapaxes(1, 2)
    return (x_BxLxHxD * scale_BxLxH[..., None]).reshape(x_BxLxHD.shape)


def _sum_outside(
    plan: RecurrentPlan, sums: SegmentSums[jax.Array], t_NxL: jax.Array | None, later: bool = False
) -> SegmentSums[jax.Array]:
    """Computes the sums over all segments before each segment, or after it, from the sums of the segments [N, …]."""
    order = -1 if later else 1
    logs = 0.0 if t_NxL is None else t_NxL[:, TILE - 1 :: TILE].sum(axis=1)

    def split_segments(a):
        return a.reshape(-1, plan.segments, *a.shape[1:])[:, ::order]

    # Entry (i, j) is the factor from the end of segment j to the start of segment i, j before i.
    after = jnp.cumsum(split_segments(jnp.broadcast_to(logs, sums.state.shape[:1])), axis=1)
    before = jnp.pad(after, ((0, 0), (1, 0)))[:, :-1]
    earlier = jnp.tri(plan.segments, k=-1, dtype=bool)
    factors = jnp.exp(jnp.where(earlier, before[:, :, None] - after[:, None, :], -jnp.inf))

    def add_up(a):
        total = jnp.einsum('nij,nj...->ni...', factors, split_segments(a), precision='highest')
        return total[:, ::order].reshape(a.shape)

    return jax.tree.map(add_up, sums)


def _attend_forward(plan: RecurrentPlan, inputs: Inputs, log_decay: jax.Array | None):
    # The layer's backward pass reads outputs, too.
    o, inverse, before = jax.tree.map(save_residual, _forward(plan, inputs, log_decay))
    return o, ((inputs, log_decay), None if inverse is None else (o, inverse), before)


@functools.partial(jax.jit, static_argnums=0)
def _attend_backward(plan: RecurrentPlan, residuals, do: jax.Array) -> tuple[Inputs, jax.Array | None]:
    from lm.ops.linear_attention.gpu.recurrent.backward import differentiate_keys, differentiate_queries
    from lm.ops.linear_attention.gpu.recurrent.forward import sum_segments

    (inputs, log_decay), fraction, before = residuals
    queries, keys, v = inputs.own, inputs.other, inputs.v
    e, g, after = None, do, None
    if fraction is not None:
        o, inverse = fraction
        batch, length, _ = do.shape
        products = (do.astype(jnp.float32) * o.astype(jnp.float32)).reshape(batch, length, plan.heads, -1)
        e = -inverse * products.sum(axis=-1).swapaxes(1, 2).reshape(inverse.shape)
        g = _scale_vectors(plan, do, inverse)
    t = None if log_decay is None else _sum_in_tiles(log_decay)
    inputs = inputs._replace(g=g.astype(v.dtype), e=e, t=t)
    if plan.segments > 1:
        sums = sum_segments(plan, inputs._replace(other=None, v=inputs.g, g=None), backwards=True)
        after = _sum_outside(plan, sums, t, later=True)
    dqueries = differentiate_queries(plan, inputs._replace(sums=before))
    dkeys = differentiate_keys(plan, inputs._replace(own=keys, other=queries, sums=after))
    dlog_decay = None
    if log_decay is not None and dqueries.decay is not None and dkeys.decay is not None:
        whole = (-1, v.shape[1])
        resets = (log_decay < decays.RESET).reshape(whole)
        dtotal = (dqueries.decay - dkeys.decay).sum(axis=0).reshape(whole)
        dlog_decay = decays.backwards_in_tiles(dtotal, resets, TILE).reshape(log_decay.shape)

    def sum_slices(results, side: SideArrays[jax.Array]) -> SideArrays[jax.Array]:
        if side.vectors is None:
            return SideArrays(features=_sum_groups(results.features, cast(jax.Array, side.features), plan.heads))
        vectors = _sum_groups(results.vectors.sum(axis=0), side.vectors, plan.heads)
        return SideArrays(vectors=vectors, shifts=results.shifts.sum(axis=0))

    dv = _sum_groups(cast(jax.Array, dkeys.values).sum(axis=0), v, plan.heads)
    drows = jax.tree.map(jnp.zeros_like, inputs.rows)
    return RecurrentArrays(sum_slices(dqueries, queries), sum_slices(dkeys, keys), drows, dv), dlog_decay


def _sum_groups(dx_BxLxHF: jax.Array, x_BxLxKF: jax.Array, heads: int) -> jax.Array:
    """Sums gradients over the heads that share a head of `x`, whose type the result has."""
    batch, length, size = x_BxLxKF.shape
    group = dx_BxLxHF.shape[2] // size
    parts = dx_BxLxHF.reshape(batch, length, heads // group, group, -1)
    return parts.sum(axis=3).reshape(x_BxLxKF.shape).astype(x_BxLxKF.dtype)


_attend.defvjp(_attend_forward, _attend_backward)
