"""The forward kernel of causal linear attention on TPUs.

N heads of all sequences, T tokens of a block, F features x of queries and y of keys, C size of what the exact kernel
compares, D head size, P rows of the packed expansion. Arrays in HBM are [N, rows, tokens]. The grid walks over groups
of heads and, for each, over the blocks in order, with the sums over earlier keys in VMEM.
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
    extended,
    moment_operand,
    moment_times,
    state_operand,
    tiles,
    weights_and_slope,
    with_one,
)
from lm.ops.linear_attention.tpu.maps import features, of_heads
from lm.ops.tpu import dot


def forward(plan: TpuPlan, save: bool, x, y, v, maps, *local, before=()) -> list[jax.Array]:
    """Outputs [N, D, L] and inverse denominators [N, 1, L]; with `save` also the sums before each block.

    Args:
        plan: L is a multiple of its block, N of its heads.
        save: also return the state's and the moment's operands before each block, [N, L / block, rows, columns].
        x: [N, F, L], or with plan.feature_map its inputs [N, E, L].
        y: as x.
        v: [N, D, L].
        maps: the map's operands for x and for y, [R, C] each, where plan.feature_map.
        local: a, b, each [N, C, L], where plan.exact_local; c [N, 1, L] float32, where plan.decay.
        before: the sums over keys before the first, of plan.sums_shapes, [N, rows, columns] float32; (): no keys.
    """
    n, head_dim, length = v.shape
    features = plan.features or x.shape[1]
    state, moment = plan.state_shape(features, head_dim), plan.moment_shape(features)
    steps = length // plan.block
    inputs = (x, y, v, *local)
    outputs = [jax.ShapeDtypeStruct(v.shape, v.dtype), jax.ShapeDtypeStruct((n, 1, length), jnp.float32)]
    tokens = [pl.BlockSpec((plan.heads, a.shape[1], plan.block), lambda i, j: (i, 0, j)) for a in (*inputs, *outputs)]
    whole = [pl.BlockSpec(w.shape, lambda i, j: (0, 0)) for w in maps]
    sums = []
    if save and not plan.single_block:
        wide = moment[1] if v.dtype == jnp.float32 else 3 * moment[1]
        shapes = [state, (moment[0], wide)] if plan.squared and plan.normalize else [state]
        outputs += [jax.ShapeDtypeStruct((n, steps, *shape), v.dtype) for shape in shapes]
        sums = [pl.BlockSpec((plan.heads, 1, *shape), lambda i, j: (i, j, 0, 0)) for shape in shapes]
    return pl.pallas_call(
        functools.partial(_kernel, plan, save and not plan.single_block, len(before)),
        name='linear_attention_forward',
        grid=(n // plan.heads, steps),
        in_specs=whole
        + tokens[: len(inputs)]
        + [pl.BlockSpec((plan.heads, *a.shape[1:]), lambda i, j: (i, 0, 0)) for a in before],
        out_specs=tokens[len(inputs) :] + sums,
        out_shape=outputs,
        scratch_shapes=[pltpu.VMEM((plan.heads, *shape), jnp.float32) for shape in (state, moment)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=('parallel', 'arbitrary'), vmem_limit_bytes=plan.vmem_limit_bytes
        ),
        cost_estimate=_cost(plan, inputs, outputs),
    )(*maps, *inputs, *before)


def _cost(plan: TpuPlan, inputs, outputs) -> pl.CostEstimate:
    n, head_dim, length = inputs[2].shape
    features = plan.features or inputs[0].shape[1]
    compared = inputs[3].shape[1] if plan.exact_local else features
    rows, columns = plan.state_shape(features, head_dim)
    moment = 8 * features**2 if plan.squared and plan.normalize else 0
    before = 0 if plan.single_block else 4 * rows * columns + moment
    inside = (compared + head_dim) * (plan.block + plan.forward_tile) + 4 * plan.projection_rows * inputs[0].shape[1]
    return pl.CostEstimate(
        flops=n * length * (before + inside),
        transcendentals=n * length * (plan.block + plan.forward_tile) // 2 if plan.decay else 0,
        bytes_accessed=sum(a.size * a.dtype.itemsize for a in (*inputs, *outputs)),
    )


def _kernel(plan: TpuPlan, save: bool, given: int, *refs):
    maps, (x, y, v, *refs) = (refs[:2], refs[2:]) if plan.feature_map else ((), refs)
    (a, b), refs = (refs[:2], refs[2:]) if plan.exact_local else ((x, y), refs)
    c, refs = (refs[0], refs[1:]) if plan.decay else (None, refs)
    before, refs = refs[:given], refs[given:]
    o, inverse, *saved, state, moment = refs

    @pl.when(pl.program_id(1) == 0)
    def _():
        state[...] = before[0][...] if before else jnp.zeros_like(state)
        moment[...] = before[1][...] if len(before) > 1 else jnp.zeros_like(moment)

    # The order of the stages is the one that the compiler schedules best; most of them do not depend on each other.
    for head, made in enumerate(of_heads(features, plan, maps, x, y, v.dtype)):
        x_FxT, y_FxT = made or (x[head], y[head])
        v_DxT, a_CxT, b_CxT = v[head], a.at[head], b.at[head]
        if plan.feature_map:
            a_CxT, b_CxT = (a_CxT, b_CxT) if plan.exact_local else (x_FxT, y_FxT)
        kept = fade_1xT = None
        if plan.decay:
            c_1xT = c[head]
            c_Tx1 = column(c_1xT)
            kept, fade_1xT = jnp.exp(last(c_1xT)), jnp.exp(last(c_1xT) - c_1xT)
        if plan.single_block:
            num_DxT, den_1xT = jnp.zeros(v_DxT.shape, jnp.float32), jnp.zeros((1, plan.block), jnp.float32)
        elif plan.squared:
            state_DxP = state_operand(plan, state[head], x_FxT.shape[0], v.dtype)
            if plan.normalize:
                moment_FxE = moment_operand(plan, moment[head], v.dtype)
                x1_FxT, y1_FxT = with_one(plan, x_FxT), with_one(plan, y_FxT)
                den_1xT = jnp.sum(moment_times(moment_FxE, x1_FxT) * x1_FxT.astype(jnp.float32), axis=0, keepdims=True)
                den_1xT = den_1xT if plan.series else jnp.maximum(den_1xT, 0.0)
                moment[head] = faded(moment[head], kept) + dot(y1_FxT, times(y1_FxT, fade_1xT), (1, 1))
            else:
                den_1xT = jnp.zeros((1, plan.block), jnp.float32)
            num_DxT = dot(state_DxP, expand(plan, x_FxT, weighted=True), (1, 0))
            faded_DxP = faded(state[head], kept)
            state[head] = faded_DxP + dot(times(v_DxT, fade_1xT), expand(plan, y_FxT, weighted=False), (1, 1))
        else:
            state_DxP = state_operand(plan, state[head], x_FxT.shape[0], v.dtype)
            num_DxT = dot(state_DxP, x_FxT, (1, 0))
            den_1xT = jnp.sum(num_DxT[v_DxT.shape[0] :], axis=0, keepdims=True)
            num_DxT = num_DxT[: v_DxT.shape[0]]
            state[head] = faded(state[head], kept) + dot(times(extended(plan, v_DxT, 1.0), fade_1xT), y_FxT, (1, 1))
        if plan.decay and not plan.single_block:
            num_DxT, den_1xT = num_DxT * jnp.exp(c_1xT), den_1xT * jnp.exp(c_1xT)
        if save:
            saved[0][head, 0] = state_DxP
            if plan.squared and plan.normalize:
                saved[1][head, 0] = moment_FxE
        if not plan.normalize:
            inverse[head] = jnp.ones(inverse.shape[1:], jnp.float32)
        for queries, keys in tiles(plan, plan.forward_tile):
            s_KxQ = dot(b_CxT[:, keys], a_CxT[:, queries], (0, 0))
            w_KxQ, _ = weights_and_slope(plan, s_KxQ)
            w_KxQ = causal(w_KxQ * pairs(c_Tx1, c_1xT, queries, keys) if plan.decay else w_KxQ)
            if not plan.normalize:
                num_DxQ = num_DxT[:, queries] + dot(v[head, :, keys], w_KxQ.astype(v.dtype), (1, 0))
                o[head, :, queries] = num_DxQ.astype(o.dtype)
                continue
            total_1xQ = plan.denominator_bias + den_1xT[:, queries] + jnp.sum(w_KxQ, axis=0, keepdims=True)
            # Padding after the last token has no keys and, with denominator_bias 0, no denominator either.
            inverse_1xQ = jnp.where(total_1xQ == 0.0, 0.0, 1.0 / total_1xQ)
            num_DxQ = num_DxT[:, queries] + dot(v[head, :, keys], w_KxQ.astype(v.dtype), (1, 0))
            inverse[head, :, queries] = inverse_1xQ
            o[head, :, queries] = (num_DxQ * inverse_1xQ).astype(o.dtype)
