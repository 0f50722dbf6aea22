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
from lm.ops.linear_attention.tpu.maps import features_and_gradient
from lm.ops.tpu import ROWS, dot


def backward(plan: TpuPlan, maps, inputs, o, do, inverse, sums) -> tuple[list[jax.Array], list[jax.Array]]:
    """The gradients of the inputs (x, y, v and, where plan.exact_local, a and b), and of the map's matrices.

    The latter, [N / heads, R, E] float32, are to be summed; there are none unless the map learns.

    Args:
        plan: the forward kernel's.
        maps: the forward kernel's.
        inputs: the forward kernel's.
        o: its outputs.
        do: their gradient.
        inverse: its inverse denominators.
        sums: what it saved before each block.
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

    def before(a):
        return pl.BlockSpec((plan.heads, 1, *a.shape[2:]), lambda i, j: (i, steps - 1 - j, 0, 0))

    read = (*inputs, o, do, inverse)
    gradients = pl.pallas_call(
        functools.partial(_kernel, plan),
        name='linear_attention_backward',
        grid=(n // plan.heads, steps),
        in_specs=[pl.BlockSpec(w.shape, lambda i, j: (0, 0)) for w in maps]
        + [tokens(a) for a in read]
        + [before(a) for a in sums],
        out_specs=[tokens(a) for a in outputs]
        + [pl.BlockSpec((1, *w.shape[1:]), lambda i, j: (i, 0, 0)) for w in learned],
        out_shape=outputs + learned,
        scratch_shapes=[pltpu.VMEM((plan.heads, *shape), jnp.float32) for shape in (state, moment)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=('parallel', 'arbitrary'), vmem_limit_bytes=plan.vmem_limit_bytes
        ),
        cost_estimate=_cost(plan, inputs, (*read, *sums, *outputs)),
    )(*maps, *read, *sums)
    return gradients[: len(outputs)], gradients[len(outputs) :]


def _cost(plan: TpuPlan, inputs, arrays) -> pl.CostEstimate:
    n, head_dim, length = inputs[2].shape
    features = plan.features or inputs[0].shape[1]
    compared = inputs[-1].shape[1] if plan.exact_local else features
    rows, columns = plan.state_shape(features, head_dim)
    before = 0 if plan.single_block else 8 * rows * columns + (14 * features**2 if plan.squared else 0)
    inside = (3 * compared + 2 * head_dim) * (plan.block + plan.tile)
    inside += (
        (12 if plan.feature_map is not None and plan.feature_map.learns else 8)
        * plan.projection_rows
        * inputs[0].shape[1]
    )
    return pl.CostEstimate(
        flops=n * length * (before + inside),
        transcendentals=0,
        bytes_accessed=sum(a.size * a.dtype.itemsize for a in arrays),
    )


def _kernel(plan: TpuPlan, *refs):
    maps, (x, y, v, *refs) = (refs[:2], refs[2:]) if plan.feature_map else ((), refs)
    a, b = refs[:2] if plan.exact_local else (x, y)
    o, do, inverse, *refs = refs[2:] if plan.exact_local else refs
    count = 0 if plan.single_block else 2 if plan.squared else 1
    sums, refs = refs[:count], refs[count:]
    dx, dy, dv, *outputs, state, moment = refs
    da_db, dmaps = (outputs[:2], outputs[2:]) if plan.exact_local else ((), outputs)

    @pl.when(pl.program_id(1) == 0)
    def _():
        state[...] = jnp.zeros_like(state)
        moment[...] = jnp.zeros_like(moment)
        for dmap in dmaps:
            dmap[...] = jnp.zeros_like(dmap)

    # The order of the stages is the one that the compiler schedules best; most of them do not depend on each other.
    for head in range(plan.heads):
        x_FxT, y_FxT, v_DxT = x[head], y[head], v[head]
        dtype = v.dtype
        do_DxT = do[head].astype(jnp.float32)
        e_1xT = -inverse[head] * jnp.sum(do_DxT * o[head].astype(jnp.float32), axis=0, keepdims=True)
        g_DxT = (do_DxT * inverse[head]).astype(dtype)

        a_CxT, b_CxT, pulls = a[head], b[head], ()
        if plan.feature_map:
            x_FxT, pull_x = features_and_gradient(plan, maps[0][...], x_FxT, True, dtype)
            y_FxT, pull_y = features_and_gradient(plan, maps[1][...], y_FxT, False, dtype)
            a_CxT, b_CxT = (a_CxT, b_CxT) if plan.exact_local else (x_FxT, y_FxT)
            pulls = (pull_x, pull_y)

        if plan.single_block:
            gradients = _inside(plan, x_FxT, y_FxT, v_DxT, g_DxT, e_1xT)
            _put(head, (dx, dy, dv), _through_maps(pulls, gradients, dmaps))
            continue

        dx_FxT = dot(sums[0][head, 0], extended(plan, g_DxT, e_1xT), (0, 0))
        if plan.squared:
            x1_FxT, y1_FxT = with_one(plan, x_FxT), with_one(plan, y_FxT)
            through_moment = moment_times(sums[1][head, 0], x1_FxT)[: x_FxT.shape[0]]
            dx_FxT = expand_gradient(plan, x_FxT, dx_FxT) + (2.0 * e_1xT) * through_moment
        da_CxT, db_CxT, dv_DxT = _inside(plan, a_CxT, b_CxT, v_DxT, g_DxT, e_1xT)

        state_DxP = state_operand(plan, state[head], y_FxT.shape[0], dtype)
        dy_FxT = dot(state_DxP, extended(plan, v_DxT, 1.0), (0, 0))
        if plan.squared:
            moment_FxE = moment_operand(plan, moment[head], dtype)
            through_moment = moment_times(moment_FxE, y1_FxT)[: y_FxT.shape[0]]
            dy_FxT = expand_gradient(plan, y_FxT, dy_FxT) + 2.0 * through_moment
            dv_DxT += dot(state_DxP, expand(plan, y_FxT, weighted=True), (1, 0))
            state[head] += dot(g_DxT, expand(plan, x_FxT, weighted=False), (1, 1))
            moment[head] += dot((x1_FxT.astype(jnp.float32) * e_1xT).astype(dtype), x1_FxT, (1, 1))
        else:
            dv_DxT += dot(state_DxP[:-ROWS], y_FxT, (1, 0))
            state[head] += dot(extended(plan, g_DxT, e_1xT), x_FxT, (1, 1))

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


def _inside(plan: TpuPlan, a_CxT, b_CxT, v_DxT, g_DxT, e_1xT) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of a, b and v through the weights inside the block."""
    cut = tiles(plan, plan.tile)
    das, dbs, dvs = [], [0.0] * len(cut), [0.0] * len(cut)
    factor = slope_factor(plan)
    for queries, keys in cut:
        s_KxQ = dot(b_CxT[:, keys], a_CxT[:, queries], (0, 0))
        dw_KxQ = dot(v_DxT[:, keys], g_DxT[:, queries], (0, 0)) + e_1xT[:, queries]
        w_KxQ, slope_KxQ = weights_and_slope(plan, s_KxQ)
        w_KxQ = causal(w_KxQ).astype(v_DxT.dtype)
        ds_KxQ = causal(dw_KxQ if slope_KxQ is None else dw_KxQ * slope_KxQ).astype(v_DxT.dtype)
        das.append(factor * dot(b_CxT[:, keys], ds_KxQ, (1, 0)))
        db_CxK = dot(a_CxT[:, queries], ds_KxQ, (1, 1))
        dv_DxK = dot(g_DxT[:, queries], w_KxQ, (1, 1))
        for i, (tile, _) in enumerate(cut[: len(das)]):
            dbs[i] += db_CxK[:, tile]
            dvs[i] += dv_DxK[:, tile]
    return jnp.concatenate(das, axis=1), factor * jnp.concatenate(dbs, axis=1), jnp.concatenate(dvs, axis=1)
