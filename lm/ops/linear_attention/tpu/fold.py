"""The kernels that sum over tokens alone.

`fold` does over the keys of a part of a window, for later parts to read, and backward over its queries, for the
gradients of the keys of earlier parts. `sums_before` gives the sums before each block, for a backward pass that did not
keep them: of many features they are several times as large as all else that a layer keeps. Letters as in the forward
kernel.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lm.ops.linear_attention.tpu.features import TpuPlan, expand, extended, state_operand, with_one
from lm.ops.linear_attention.tpu.maps import features
from lm.ops.tpu import dot
from lm.ops.tpu.decay import times


def fold(plan: TpuPlan, queries: bool, y, u, w, maps=()) -> list[jax.Array]:
    """Σ u φ(y)ᵀ and Σ w y yᵀ, or with plain features Σ w φ(y) below the former: of plan.sums_shapes, float32.

    Args:
        plan: as in `forward`, but any number N of heads.
        queries: whether the feature map is that of queries.
        y: [N, F, L], or with plan.feature_map its inputs [N, E, L].
        u: [N, D, L].
        w: [N, 1, L] float32.
        maps: the map's operand [R, C], where plan.feature_map.
    """
    n, head_dim, length = u.shape
    shapes = plan.sums_shapes(plan.features or y.shape[1], head_dim)
    heads = max(h for h in range(1, plan.heads + 1) if n % h == 0)
    inputs = (y, u, w)
    read = sum(a.size * a.dtype.itemsize for a in inputs)
    products = sum(rows * columns for rows, columns in shapes) + plan.projection_rows * y.shape[1]
    return pl.pallas_call(
        functools.partial(_kernel, plan, queries, heads),
        name='linear_attention_fold',
        grid=(n // heads, length // plan.block),
        in_specs=[pl.BlockSpec(m.shape, lambda i, j: (0, 0)) for m in maps]
        + [pl.BlockSpec((heads, a.shape[1], plan.block), lambda i, j: (i, 0, j)) for a in inputs],
        out_specs=[pl.BlockSpec((heads, *shape), lambda i, j: (i, 0, 0)) for shape in shapes],
        out_shape=[jax.ShapeDtypeStruct((n, *shape), jnp.float32) for shape in shapes],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=('parallel', 'arbitrary'), vmem_limit_bytes=plan.vmem_limit_bytes
        ),
        cost_estimate=pl.CostEstimate(flops=2 * n * length * products, transcendentals=0, bytes_accessed=read),
    )(*maps, *inputs)


def sums_before(plan: TpuPlan, y, v, matrix) -> list[jax.Array]:
    """What `forward` with `save` gives besides outputs and denominators, of a feature map, from keys alone.

    Args:
        plan: as in `forward`.
        y: as in `forward`.
        v: as in `forward`.
        matrix: the map's operand for keys.
    """
    n, head_dim, length = v.shape
    steps = length // plan.block
    rows, columns = plan.state_shape(plan.features, head_dim)
    inputs = (y, v)
    result = jax.ShapeDtypeStruct((n, steps, rows, columns), v.dtype)
    products = rows * columns + plan.projection_rows * y.shape[1]
    moved = sum(a.size * a.dtype.itemsize for a in (*inputs, result))
    return pl.pallas_call(
        functools.partial(_kernel_before, plan),
        name='linear_attention_sums',
        grid=(n // plan.heads, steps),
        in_specs=[pl.BlockSpec(matrix.shape, lambda i, j: (0, 0))]
        + [pl.BlockSpec((plan.heads, a.shape[1], plan.block), lambda i, j: (i, 0, j)) for a in inputs],
        out_specs=[pl.BlockSpec((plan.heads, 1, rows, columns), lambda i, j: (i, j, 0, 0))],
        out_shape=[result],
        scratch_shapes=[pltpu.VMEM((plan.heads, rows, columns), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=('parallel', 'arbitrary'), vmem_limit_bytes=plan.vmem_limit_bytes
        ),
        cost_estimate=pl.CostEstimate(flops=2 * n * length * products, transcendentals=0, bytes_accessed=moved),
    )(matrix, *inputs)


def _kernel_before(plan: TpuPlan, matrix, y, v, sums, state):
    @pl.when(pl.program_id(1) == 0)
    def _():
        state[...] = jnp.zeros_like(state)

    made = [features(plan, matrix[...], y[head], False, v.dtype) for head in range(plan.heads)]  # as in `of_heads`
    for head, y_FxT in enumerate(made):
        sums[head, 0] = state_operand(plan, state[head], y_FxT.shape[0], v.dtype)
        state[head] += dot(extended(plan, v[head], 1.0), y_FxT, (1, 1))


def _kernel(plan: TpuPlan, queries: bool, heads: int, *refs):
    maps, (y, u, w, state, *moment) = (refs[:1], refs[1:]) if plan.feature_map else ((), refs)

    @pl.when(pl.program_id(1) == 0)
    def _():
        for sums in (state, *moment):
            sums[...] = jnp.zeros_like(sums)

    for head in range(heads):
        y_FxT, u_DxT, w_1xT = y[head], u[head], w[head]
        if plan.feature_map:
            y_FxT = features(plan, maps[0][...], y_FxT, queries, u.dtype)
        if plan.squared:
            state[head] += dot(u_DxT, expand(plan, y_FxT, weighted=False), (1, 1))
        else:
            state[head] += dot(extended(plan, u_DxT, w_1xT), y_FxT, (1, 1))
        if moment:
            y1_FxT = with_one(plan, y_FxT)
            moment[0][head] += dot(times(y1_FxT, w_1xT), y1_FxT, (1, 1))
