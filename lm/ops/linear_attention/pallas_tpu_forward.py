"""The forward kernel of causal linear attention on TPUs.

N heads of all sequences, T tokens, F features of x, P of φ(x), D head size; all arrays feature by token.
"""

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
    power,
    stacked,
    tiles,
)


def kernel(plan: Plan, save: bool, *refs):
    fq, fk, v, *rest = refs
    q, k = rest[:2] if plan.exact_local else (fq, fk)
    rest = rest[2:] if plan.exact_local else rest
    o, inverse, *rest = rest
    states, moments = rest[:2] if save else (None, None)
    state, moment = rest[-2:]

    @pl.when(pl.program_id(1) == 0)
    def _():
        state[...] = jnp.zeros_like(state)
        moment[...] = jnp.zeros_like(moment)

    for head in range(plan.heads):
        dtype = v.dtype
        fq_FxT, fk_FxT = fq[head].astype(jnp.float32), fk[head].astype(jnp.float32)
        state_DxP = state[head].astype(dtype)
        rows_FxE = exact_rows(moment[head], dtype)
        if save:
            states[head, 0] = state_DxP
            moments[head, 0] = rows_FxE
        num_DxT = dot(state_DxP, pack(fq_FxT, True).astype(dtype), (1, 0))
        den_1xT = jnp.sum(dot(rows_FxE, stacked(fq[head]), (1, 0)) * fq_FxT, axis=0, keepdims=True)
        state[head] += dot(v[head], pack(fk_FxT, False).astype(dtype), (1, 1))
        moment[head] += dot(fk[head], fk[head], (1, 1))
        for queries, seen in tiles(plan):
            num, den = num_DxT[:, queries], jnp.maximum(den_1xT[:, queries], 0.0)
            for keys, diagonal in seen:
                weights = causal(power(dot(k[head, :, keys], q[head, :, queries], (0, 0)), plan.degree), diagonal)
                den += jnp.sum(weights, axis=0, keepdims=True)
                num += dot(v[head, :, keys], weights.astype(dtype), (1, 0))
            inv = 1.0 / (plan.bias + den)
            inverse[head, :, queries] = inv
            o[head, :, queries] = (num * inv).astype(o.dtype)


def forward(plan: Plan, save: bool, fq, fk, v, *local):
    n, d, t = v.shape
    f = fq.shape[1]
    p = plan.width(f)
    e = f if v.dtype == jnp.float32 else 3 * f
    steps = t // plan.block
    spec = lambda rows: pl.BlockSpec((plan.heads, rows, plan.block), lambda i, j: (i, 0, j))
    per_block = lambda rows, columns: pl.BlockSpec((plan.heads, 1, rows, columns), lambda i, j: (i, j, 0, 0))
    outs = [jax.ShapeDtypeStruct(v.shape, v.dtype), jax.ShapeDtypeStruct((n, 1, t), jnp.float32)]
    out_specs = [spec(d), spec(1)]
    if save:
        outs += [jax.ShapeDtypeStruct((n, steps, d, p), v.dtype), jax.ShapeDtypeStruct((n, steps, f, e), v.dtype)]
        out_specs += [per_block(d, p), per_block(f, e)]
    ins = (fq, fk, v, *local)
    return pl.pallas_call(
        functools.partial(kernel, plan, save),
        name='polysketch_forward',
        grid=(n // plan.heads, steps),
        in_specs=[spec(x.shape[1]) for x in ins],
        out_specs=out_specs,
        out_shape=outs,
        scratch_shapes=[pltpu.VMEM((plan.heads, d, p), jnp.float32), pltpu.VMEM((plan.heads, f, f), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=('parallel', 'arbitrary'), vmem_limit_bytes=plan.vmem_limit_bytes
        ),
        interpret=plan.interpret,
    )(*ins)
