"""The backward kernel of causal linear attention on TPUs: one sweep from the last block to the first."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lm.ops.linear_attention.pallas_tpu_features import (
    Plan,
    causal,
    dot,
    exact_rows,
    pack,
    power_and_slope,
    stacked,
    tiles,
    unpack_gradient,
)


def kernel(plan: Plan, *refs):
    fq, fk, v, *rest = refs
    q, k = rest[:2] if plan.exact_local else (fq, fk)
    rest = rest[2:] if plan.exact_local else rest
    o, do, inverse, states, moments, dfq, dfk, dv, *rest = rest
    dq, dk = rest[:2] if plan.exact_local else (None, None)
    state, moment = rest[-2:]

    @pl.when(pl.program_id(1) == 0)
    def _():
        state[...] = jnp.zeros_like(state)
        moment[...] = jnp.zeros_like(moment)

    for head in range(plan.heads):
        dtype = v.dtype
        inv = inverse[head]
        do_DxT = do[head].astype(jnp.float32)
        dden = -inv * jnp.sum(do_DxT * o[head].astype(jnp.float32), axis=0, keepdims=True)
        g = (do_DxT * inv).astype(dtype)
        fq_FxT, fk_FxT = fq[head].astype(jnp.float32), fk[head].astype(jnp.float32)
        # queries
        dfeat = dot(states[head, 0], g, (0, 0))
        dfq_ = unpack_gradient(fq_FxT, dfeat)
        dfq_ += (2 * dden) * dot(moments[head, 0], stacked(fq[head]), (1, 0))
        # keys
        state_DxP = state[head].astype(dtype)
        dfk_ = unpack_gradient(fk_FxT, dot(state_DxP, v[head], (0, 0)))
        dfk_ += 2 * dot(exact_rows(moment[head], dtype), stacked(fk[head]), (1, 0))
        dv_ = dot(state_DxP, pack(fk_FxT, True).astype(dtype), (1, 0))
        state[head] += dot(g, pack(fq_FxT, False).astype(dtype), (1, 1))
        moment[head] += dot((fq_FxT * dden).astype(dtype), fq[head], (1, 1))
        # local
        n = plan.block // plan.tile
        dqs, dks, dvs = [0.0] * n, [0.0] * n, [dv_[:, i * plan.tile : (i + 1) * plan.tile] for i in range(n)]
        for i, (queries, seen) in enumerate(tiles(plan)):
            for j, (keys, diagonal) in enumerate(seen):
                s = dot(k[head, :, keys], q[head, :, queries], (0, 0))
                dw = dot(v[head, :, keys], g[:, queries], (0, 0)) + dden[:, queries]
                w, slope = power_and_slope(s, plan.degree)
                w = causal(w, diagonal).astype(dtype)
                ds = causal(dw if slope is None else dw * slope, diagonal).astype(dtype)
                dqs[i] += dot(k[head, :, keys], ds, (1, 0))
                dks[j] += dot(q[head, :, queries], ds, (1, 1))
                dvs[j] += dot(g[:, queries], w, (1, 1))
        for i, (queries, seen) in enumerate(tiles(plan)):
            dv[head, :, queries] = dvs[i].astype(dv.dtype)
            a, b = plan.degree * dqs[i], plan.degree * dks[i]
            if plan.exact_local:
                dq[head, :, queries] = a.astype(dq.dtype)
                dk[head, :, queries] = b.astype(dk.dtype)
                dfq[head, :, queries] = dfq_[:, queries].astype(dfq.dtype)
                dfk[head, :, queries] = dfk_[:, queries].astype(dfk.dtype)
            else:
                dfq[head, :, queries] = (a + dfq_[:, queries]).astype(dfq.dtype)
                dfk[head, :, queries] = (b + dfk_[:, queries]).astype(dfk.dtype)


def backward(plan: Plan, fq, fk, v, local, o, do, inverse, states, moments):
    n, d, t = v.shape
    f = fq.shape[1]
    p = plan.width(f)
    steps = t // plan.block
    spec = lambda rows: pl.BlockSpec((plan.heads, rows, plan.block), lambda i, j: (i, 0, steps - 1 - j))
    per_block = lambda x: pl.BlockSpec((plan.heads, 1, *x.shape[2:]), lambda i, j: (i, steps - 1 - j, 0, 0))
    ins = (fq, fk, v, *local, o, do, inverse)
    outs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (fq, fk, v, *local)]
    return pl.pallas_call(
        functools.partial(kernel, plan),
        name='polysketch_backward',
        grid=(n // plan.heads, steps),
        in_specs=[spec(x.shape[1]) for x in ins] + [per_block(states), per_block(moments)],
        out_specs=[spec(x.shape[1]) for x in outs],
        out_shape=outs,
        scratch_shapes=[pltpu.VMEM((plan.heads, d, p), jnp.float32), pltpu.VMEM((plan.heads, f, f), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=('parallel', 'arbitrary'), vmem_limit_bytes=plan.vmem_limit_bytes
        ),
        interpret=plan.interpret,
    )(*ins, states, moments)
