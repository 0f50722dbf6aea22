"""The kernels that sum over tokens alone.

`fold` sums over the keys of a part of a window, for later parts to read. In the backward pass it sums over the part's
queries, for the gradients of earlier parts' keys. `sum_before` computes the sums before each block, for a backward pass
that did not keep them: with many features they are several times as large as all other residuals of a layer. Letters
are explained in the forward kernel.
"""

import functools
from typing import cast

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lm.ops.linear_attention.feature_maps import ProductMap
from lm.ops.linear_attention.tpu.features import append_one, expand, extend, make_state_operand
from lm.ops.linear_attention.tpu.maps import make_features
from lm.ops.linear_attention.tpu.plan import KernelSums, Ref, TpuPlan
from lm.ops.tpu import dot
from lm.ops.tpu.decay import multiply_tokens


def fold(
    plan: TpuPlan,
    queries: bool,
    y_NxFxL: jax.Array,
    u_NxDxL: jax.Array,
    w_Nx1xL: jax.Array,
    operand_RxC: jax.Array | None = None,
) -> KernelSums[jax.Array]:
    """Computes Σ u φ(y)ᵀ and Σ w y yᵀ, or with plain features Σ w φ(y) below the state, in float32.

    Args:
        plan: as in `forward`, but any number N of heads; its `sums_shapes` are the shapes of the results.
        queries: True where the feature map takes y as queries.
        y_NxFxL: features; with plan.feature_map the inputs of the map [N, E, L].
        u_NxDxL: the left side of the state's products with the features.
        w_Nx1xL: weights of the tokens in the moment, float32; for plain features in Σ φ(y).
        operand_RxC: the operand of the map, where plan.feature_map.
    """
    n, head_dim, length = u_NxDxL.shape
    shapes, tokens = plan.sums_shapes(plan.features or y_NxFxL.shape[1], head_dim), (y_NxFxL, u_NxDxL, w_Nx1xL)
    sums = KernelSums(*(None if s is None else jax.ShapeDtypeStruct((n, *s), jnp.float32) for s in shapes))
    heads = max(h for h in range(1, plan.heads + 1) if n % h == 0)
    read = sum(a.size * a.dtype.itemsize for a in tokens)
    products = sum(a.shape[1] * a.shape[2] for a in jax.tree.leaves(sums))
    products += plan.projection_rows * y_NxFxL.shape[1]
    (sums,) = pl.pallas_call(
        functools.partial(_fold_kernel, plan, queries, heads),
        name='linear_attention_fold',
        grid=(n // heads, length // plan.block),
        in_specs=[
            jax.tree.map(lambda w: pl.BlockSpec(w.shape, lambda i, j: (0, 0)), operand_RxC),
            *(pl.BlockSpec((heads, a.shape[1], plan.block), lambda i, j: (i, 0, j)) for a in tokens),
        ],
        out_specs=(jax.tree.map(lambda a: pl.BlockSpec((heads, *a.shape[1:]), lambda i, j: (i, 0, 0)), sums),),
        out_shape=(sums,),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=('parallel', 'arbitrary'), vmem_limit_bytes=plan.vmem_limit_bytes
        ),
        cost_estimate=pl.CostEstimate(flops=2 * n * length * products, transcendentals=0, bytes_accessed=read),
    )(operand_RxC, *tokens)
    return sums


def sum_before(plan: TpuPlan, y_NxExL: jax.Array, v_NxDxL: jax.Array, operand_RxC: jax.Array) -> KernelSums[jax.Array]:
    """Computes the sums of a feature map that `forward` with `save` returns, from keys alone.

    Args:
        plan: as in `forward`.
        y_NxExL: inputs of the map.
        v_NxDxL: values.
        operand_RxC: the operand of the map for keys.
    """
    n, head_dim, length = v_NxDxL.shape
    steps = length // plan.block
    rows, columns = plan.state_shape(plan.features, head_dim)
    inputs = (y_NxExL, v_NxDxL)
    result = jax.ShapeDtypeStruct((n, steps, rows, columns), v_NxDxL.dtype)
    products = rows * columns + plan.projection_rows * y_NxExL.shape[1]
    moved = sum(a.size * a.dtype.itemsize for a in (*inputs, result))
    state = pl.pallas_call(
        functools.partial(_before_kernel, plan),
        name='linear_attention_sums',
        grid=(n // plan.heads, steps),
        in_specs=[pl.BlockSpec(operand_RxC.shape, lambda i, j: (0, 0))]
        + [pl.BlockSpec((plan.heads, a.shape[1], plan.block), lambda i, j: (i, 0, j)) for a in inputs],
        out_specs=pl.BlockSpec((plan.heads, 1, rows, columns), lambda i, j: (i, j, 0, 0)),
        out_shape=result,
        scratch_shapes=[pltpu.VMEM((plan.heads, rows, columns), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=('parallel', 'arbitrary'), vmem_limit_bytes=plan.vmem_limit_bytes
        ),
        cost_estimate=pl.CostEstimate(flops=2 * n * length * products, transcendentals=0, bytes_accessed=moved),
    )(operand_RxC, *inputs)
    return KernelSums(state, None)


def _before_kernel(plan: TpuPlan, operand: Ref, y: Ref, v: Ref, saved: Ref, state: Ref) -> None:
    @pl.when(pl.program_id(1) == 0)
    def _():
        state[...] = jnp.zeros_like(state)

    feature_map = cast(ProductMap, plan.feature_map)  # no other plan has this kernel
    # All are written before anything reads one, as in `make_of_heads`.
    made = [make_features(feature_map, operand[...], y[head], False, v.dtype).phi_MxT for head in range(plan.heads)]
    for head, y_FxT in enumerate(made):
        saved[head, 0] = make_state_operand(plan, state[head], y_FxT.shape[0], v.dtype)
        state[head] += dot(extend(plan, v[head], 1.0), y_FxT, (1, 1))


def _fold_kernel(
    plan: TpuPlan, queries: bool, heads: int, operand: Ref | None, y: Ref, u: Ref, w: Ref, sums: KernelSums[Ref]
) -> None:
    @pl.when(pl.program_id(1) == 0)
    def _():
        for ref in jax.tree.leaves(sums):
            ref[...] = jnp.zeros_like(ref)

    for head in range(heads):
        y_FxT, u_DxT, w_1xT = (ref[head] for ref in (y, u, w))
        if plan.feature_map is not None and operand is not None:
            y_FxT = make_features(plan.feature_map, operand[...], y_FxT, queries, u.dtype).phi_MxT
        if plan.squared:
            sums.state[head] += dot(u_DxT, expand(plan, y_FxT, weighted=False), (1, 1))
        else:
            sums.state[head] += dot(extend(plan, u_DxT, w_1xT), y_FxT, (1, 1))
        if sums.moment is not None:
            y1_FxT = append_one(plan, y_FxT)
            sums.moment[head] += dot(multiply_tokens(y1_FxT, w_1xT), y1_FxT, (1, 1))
