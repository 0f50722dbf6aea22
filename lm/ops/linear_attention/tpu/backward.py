"""The backward kernel of causal linear attention on TPUs: one sweep from the last block to the first.

With g = do / denominator and e = -⟨do, o⟩ / denominator, the gradients of numerator and denominator, a key y with
value v meets the later queries only in Σ g φ(x)ᵀ and Σ e x xᵀ, which stay in VMEM; a query meets the earlier keys
in the sums that the forward kernel saved. Letters as in the forward kernel.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lm.ops.linear_attention.tpu.decay import column, faded, last, pairs, times
from lm.ops.linear_attention.tpu.features import (
    TpuPlan,
    causal,
    expand,
    expand_gradient,
    extended,
    moment_operand,
    moment_times,
    slope_factor,
    state_operand,
    tiles,
    weights_and_slope,
    with_one,
)
from lm.ops.linear_attention.tpu.maps import features_and_gradient, of_heads
from lm.ops.tpu import ROWS, dot


def backward(plan: TpuPlan, maps, inputs, o, do, inverse, sums, after=()) -> tuple[list[jax.Array], list[jax.Array]]:
    """The gradients of the inputs (x, y, v and, where the plan has them, a and b, and c), and of the map's matrices.

    The latter, [N / heads, R, E] float32, are to be summed; there are none unless the map learns.

    Args:
        plan: the forward kernel's.
        maps: the forward kernel's.
        inputs: the forward kernel's.
        o: its outputs.
        do: their gradient.
        inverse: its inverse denominators.
        sums: what it saved before each block.
        after: Σ g φ(x)ᵀ and, with a moment, Σ e x xᵀ over the queries after the last, of plan.sums_shapes,
            [N, rows, columns] float32; (): no queries.
    """
    n, head_dim, length = o.shape
    features = plan.features or inputs[0].shape[1]
    state, moment = plan.state_shape(features, head_dim), plan.moment_shape(features)
    steps = length // plan.block
    outputs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in inputs]
    learned = []
    if plan.feature_map is not None and plan.feature_map.learns:
        shape = (n // plan.heads, plan.projection_rows, inputs[0].shape[1])
        learned = [jax.ShapeDtypeStruct(shape, jnp.float32)] * 2

    def tokens(a):
        return pl.BlockSpec((plan.heads, a.shape[1], plan.block), lambda i, j: (i, 0, steps - 1 - j))

    def whole(a):
        return pl.BlockSpec((plan.heads, *a.shape[1:]), lambda i, j: (i, 0, 0))

    def before(a):
        return pl.BlockSpec((plan.heads, 1, *a.shape[2:]), lambda i, j: (i, steps - 1 - j, 0, 0))

    read = (*inputs, o, do, inverse)
    gradients = pl.pallas_call(
        functools.partial(_kernel, plan, len(after)),
        name='linear_attention_backward',
        grid=(n // plan.heads, steps),
        in_specs=[pl.BlockSpec(w.shape, lambda i, j: (0, 0)) for w in maps]
        + [tokens(a) for a in read]
        + [before(a) for a in sums]
        + [whole(a) for a in after],
        out_specs=[tokens(a) for a in outputs]
        + [pl.BlockSpec((1, *w.shape[1:]), lambda i, j: (i, 0, 0)) for w in learned],
        out_shape=outputs + learned,
        scratch_shapes=[pltpu.VMEM((plan.heads, *shape), jnp.float32) for shape in (state, moment)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=('parallel', 'arbitrary'), vmem_limit_bytes=plan.vmem_limit_bytes
        ),
        cost_estimate=_cost(plan, inputs, (*read, *sums, *outputs)),
    )(*maps, *read, *sums, *after)
    return gradients[: len(outputs)], gradients[len(outputs) :]


def _cost(plan: TpuPlan, inputs, arrays) -> pl.CostEstimate:
    n, head_dim, length = inputs[2].shape
    features = plan.features or inputs[0].shape[1]
    compared = inputs[3].shape[1] if plan.exact_local else features
    rows, columns = plan.state_shape(features, head_dim)
    moment = 14 * features**2 if plan.squared and plan.normalize else 0
    before = 0 if plan.single_block else 8 * rows * columns + moment
    inside = (3 * compared + 2 * head_dim) * (plan.block + plan.tile)
    inside += (
        (12 if plan.feature_map is not None and plan.feature_map.learns else 8)
        * plan.projection_rows
        * inputs[0].shape[1]
    )
    return pl.CostEstimate(
        flops=n * length * (before + inside),
        transcendentals=n * length * (plan.block + plan.tile) // 2 if plan.decay else 0,
        bytes_accessed=sum(a.size * a.dtype.itemsize for a in arrays),
    )


def _kernel(plan: TpuPlan, given: int, *refs):
    maps, (x, y, v, *refs) = (refs[:2], refs[2:]) if plan.feature_map else ((), refs)
    (a, b), refs = (refs[:2], refs[2:]) if plan.exact_local else ((x, y), refs)
    c, refs = (refs[0], refs[1:]) if plan.decay else (None, refs)
    o, do, inverse, *refs = refs
    count = 0 if plan.single_block else 2 if plan.squared and plan.normalize else 1
    sums, after, refs = refs[:count], refs[count : count + given], refs[count + given :]
    dx, dy, dv, *outputs, state, moment = refs
    da_db, outputs = (outputs[:2], outputs[2:]) if plan.exact_local else ((), outputs)
    dc, dmaps = (outputs[0], outputs[1:]) if plan.decay else (None, outputs)

    @pl.when(pl.program_id(1) == 0)
    def _():
        state[...] = after[0][...] if after else jnp.zeros_like(state)
        moment[...] = after[1][...] if len(after) > 1 else jnp.zeros_like(moment)
        for dmap in dmaps:
            dmap[...] = jnp.zeros_like(dmap)

    # The order of the stages is the one that the compiler schedules best; most of them do not depend on each other.
    dtype = v.dtype
    for head, made in enumerate(of_heads(features_and_gradient, plan, maps, x, y, dtype)):
        x_FxT, y_FxT, v_DxT = x[head], y[head], v[head]
        do_DxT = do[head].astype(jnp.float32)
        negative_1xT = -inverse[head]
        row_1xT = jnp.sum(do_DxT * o[head].astype(jnp.float32), axis=0, keepdims=True)
        e_1xT = negative_1xT * row_1xT if plan.normalize else jnp.zeros_like(row_1xT)
        g_DxT = (do_DxT * inverse[head]).astype(dtype)
        fading = kept = read_1xT = fade_1xT = None
        if plan.decay:
            c_1xT = c[head]
            fading = column(c_1xT), c_1xT
            kept, read_1xT, fade_1xT = jnp.exp(last(c_1xT)), jnp.exp(c_1xT), jnp.exp(last(c_1xT) - c_1xT)

        a_CxT, b_CxT, pulls = a[head], b[head], ()
        if plan.feature_map:
            (x_FxT, pull_x), (y_FxT, pull_y) = made
            a_CxT, b_CxT = (a_CxT, b_CxT) if plan.exact_local else (x_FxT, y_FxT)
            pulls = (pull_x, pull_y)

        if plan.single_block:
            *gradients, done_1xT = _inside(plan, x_FxT, y_FxT, v_DxT, g_DxT, e_1xT, fading)
            if plan.decay:
                dc[head] = _dc(plan, row_1xT, e_1xT, v_DxT, gradients[2], done_1xT)
            _put(head, (dx, dy, dv), _through_maps(pulls, gradients, dmaps))
            continue

        # What a query reads of the sums has faded since the block began.
        gf_DxT, ef_1xT = times(g_DxT, read_1xT), times(e_1xT, read_1xT)
        dx_FxT = dot(sums[0][head, 0], extended(plan, gf_DxT, ef_1xT), (0, 0))
        if plan.squared and plan.normalize:
            x1_FxT, y1_FxT = with_one(plan, x_FxT), with_one(plan, y_FxT)
            through_moment = moment_times(sums[1][head, 0], x1_FxT)[: x_FxT.shape[0]]
            dx_FxT = expand_gradient(plan, x_FxT, dx_FxT) + (2.0 * ef_1xT) * through_moment
        elif plan.squared:
            dx_FxT = expand_gradient(plan, x_FxT, dx_FxT)
        da_CxT, db_CxT, dv_DxT, done_1xT = _inside(plan, a_CxT, b_CxT, v_DxT, g_DxT, e_1xT, fading)

        # Later queries see the keys as of the block's end.
        state_DxP = state_operand(plan, state[head], y_FxT.shape[0], dtype)
        dy_FxT = dot(state_DxP, times(extended(plan, v_DxT, 1.0), fade_1xT), (0, 0))
        if plan.squared:
            if plan.normalize:
                moment_FxE = moment_operand(plan, moment[head], dtype)
                of_keys_FxT = moment_times(moment_FxE, y1_FxT)
                through_moment = of_keys_FxT[: y_FxT.shape[0]]
                dy_FxT = expand_gradient(plan, y_FxT, dy_FxT) + 2.0 * faded(through_moment, fade_1xT)
                if plan.decay:
                    far_1xT = jnp.sum(of_keys_FxT * y1_FxT.astype(jnp.float32), axis=0, keepdims=True)
                    done_1xT += far_1xT * fade_1xT
            else:
                dy_FxT = expand_gradient(plan, y_FxT, dy_FxT)
            dv_DxT += faded(dot(state_DxP, expand(plan, y_FxT, weighted=True), (1, 0)), fade_1xT)
            state[head] = faded(state[head], kept) + dot(gf_DxT, expand(plan, x_FxT, weighted=False), (1, 1))
            if plan.normalize:
                before = faded(moment[head], kept)
                moment[head] = before + dot((x1_FxT.astype(jnp.float32) * ef_1xT).astype(dtype), x1_FxT, (1, 1))
        elif plan.decay:
            far_DxT = faded(dot(state_DxP, y_FxT, (1, 0)), fade_1xT)
            done_1xT += jnp.sum(far_DxT[-ROWS:], axis=0, keepdims=True)
            dv_DxT += far_DxT[:-ROWS]
            state[head] = faded(state[head], kept) + dot(extended(plan, gf_DxT, ef_1xT), x_FxT, (1, 1))
        else:
            dv_DxT += dot(state_DxP[:-ROWS], y_FxT, (1, 0))
            state[head] += dot(extended(plan, g_DxT, e_1xT), x_FxT, (1, 1))
        if plan.decay:
            dc[head] = _dc(plan, row_1xT, e_1xT, v_DxT, dv_DxT, done_1xT)

        if plan.exact_local:
            _put(head, da_db, (da_CxT, db_CxT))
        else:
            dx_FxT, dy_FxT = dx_FxT + da_CxT, dy_FxT + db_CxT
        _put(head, (dx, dy, dv), _through_maps(pulls, (dx_FxT, dy_FxT, dv_DxT), dmaps))


def _through_maps(pulls, gradients, dmaps):
    """The gradients of x, y and v, with a map those of its inputs; what its matrices get is added to theirs."""
    if not pulls:
        return gradients
    *dfeatures, dv_DxT = gradients
    (dx_ExT, dw_RxE), (dy_ExT, du_RxE) = (pull(d) for pull, d in zip(pulls, dfeatures, strict=True))
    if dmaps:
        dmaps[0][0] += dw_RxE
        dmaps[1][0] += du_RxE
    return dx_ExT, dy_ExT, dv_DxT


def _put(head: int, refs, values) -> None:
    for ref, value in zip(refs, values, strict=True):
        ref[head] = value.astype(ref.dtype)


def _dc(plan: TpuPlan, row_1xT, e_1xT, v_DxT, dv_DxT, done_1xT) -> jax.Array:
    """The gradient of a token's running sum: what its weights as a query would gain, less what they would as a key.

    Σ_j w_ij dw_ij of query i is ⟨do, o⟩, with a denominator only denominator_bias / denominator of it, and
    Σ_i w_ij dw_ij of key j is ⟨v, dv⟩ + Σ_i w_ij e_i: no pair has to be looked at.
    """
    as_query_1xT = -plan.denominator_bias * e_1xT if plan.normalize else row_1xT
    return as_query_1xT - jnp.sum(v_DxT.astype(jnp.float32) * dv_DxT, axis=0, keepdims=True) - done_1xT


def _inside(plan: TpuPlan, a_CxT, b_CxT, v_DxT, g_DxT, e_1xT, fading) -> tuple[jax.Array, ...]:
    """The gradients of a, b and v through the weights inside the block, and Σ w e over a key's queries, [1, T].

    The latter is asked for with decay alone: `fading`, c as column and as row.
    """
    cut = tiles(plan, plan.tile)
    das, dbs, dvs = [], [0.0] * len(cut), [0.0] * len(cut)
    head_dim = v_DxT.shape[0]
    if fading is not None and plan.normalize:
        rows = jnp.broadcast_to(e_1xT, (ROWS, e_1xT.shape[1])).astype(g_DxT.dtype)
        ge_DxT = jnp.concatenate([g_DxT, rows], axis=0)
    else:
        ge_DxT = g_DxT
    factor = slope_factor(plan)
    for queries, keys in cut:
        s_KxQ = dot(b_CxT[:, keys], a_CxT[:, queries], (0, 0))
        dw_KxQ = dot(v_DxT[:, keys], g_DxT[:, queries], (0, 0)) + e_1xT[:, queries]
        w_KxQ, slope_KxQ = weights_and_slope(plan, s_KxQ)
        if fading is not None:
            factors_KxQ = pairs(*fading, queries, keys)
            w_KxQ, dw_KxQ = w_KxQ * factors_KxQ, dw_KxQ * factors_KxQ
        w_KxQ = causal(w_KxQ).astype(v_DxT.dtype)
        ds_KxQ = causal(dw_KxQ if slope_KxQ is None else dw_KxQ * slope_KxQ).astype(v_DxT.dtype)
        das.append(factor * dot(b_CxT[:, keys], ds_KxQ, (1, 0)))
        db_CxK = dot(a_CxT[:, queries], ds_KxQ, (1, 1))
        dv_DxK = dot(ge_DxT[:, queries], w_KxQ, (1, 1))
        for i, (tile, _) in enumerate(cut[: len(das)]):
            dbs[i] += db_CxK[:, tile]
            dvs[i] += dv_DxK[:, tile]
    da_CxT, db_CxT, dv_DxT = (
        jnp.concatenate(das, axis=1),
        factor * jnp.concatenate(dbs, axis=1),
        jnp.concatenate(dvs, axis=1),
    )
    if ge_DxT is g_DxT:
        return da_CxT, db_CxT, dv_DxT, 0.0
    return da_CxT, db_CxT, dv_DxT[:head_dim], dv_DxT[head_dim : head_dim + 1]
