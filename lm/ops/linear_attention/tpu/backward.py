"""The backward kernel of causal linear attention on TPUs: one sweep from the last block to the first.

g = do / denominator and e = -⟨do, o⟩ / denominator are the gradients of numerator and denominator. A key y with value v
meets the later queries only in Σ g φ(x)ᵀ and Σ e x xᵀ, which stay in VMEM. A query meets the earlier keys in the sums
that the forward kernel saved. Other letters are explained in the forward kernel.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lm.ops.linear_attention.tpu.features import expand
from lm.ops.linear_attention.tpu.forward import ForwardResults, start_sums
from lm.ops.linear_attention.tpu.gradients import HeadGradients, KernelGradients
from lm.ops.linear_attention.tpu.maps import make_of_heads, make_with_gradient
from lm.ops.linear_attention.tpu.plan import KernelInputs, KernelSums, Ref, TpuPlan
from lm.ops.linear_attention.types import Sides
from lm.ops.tpu.order import ahead, in_turn


def backward(
    plan: TpuPlan,
    maps: Sides[jax.Array] | None,
    inputs: KernelInputs,
    results: ForwardResults[jax.Array],
    do_NxDxL: jax.Array,
    after: KernelSums[jax.Array] | None = None,
) -> KernelGradients[jax.Array]:
    """Computes the gradients of the inputs and of the map's matrices.

    Args:
        plan: the plan of the forward kernel.
        maps: the operands of the forward kernel.
        inputs: the inputs of the forward kernel.
        results: the results of the forward kernel.
        do_NxDxL: the gradient of its outputs.
        after: Σ g φ(x)ᵀ and, with a moment, Σ e x xᵀ over the queries after the last, of plan.sums_shapes; None: no
            queries.
    """
    n, head_dim, length = do_NxDxL.shape
    features = plan.features or inputs.x_NxFxL.shape[1]
    state, moment = plan.state_shape(features, head_dim), plan.moment_shape(features)
    steps = length // plan.block
    differentiated = inputs._replace(rest_Nx1xL=None)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), differentiated)
    gradients = KernelGradients(shapes, None, None)
    if plan.decay and not plan.single_block:
        gradients = gradients._replace(crossing=jax.ShapeDtypeStruct((n, steps, 1, state[1]), jnp.float32))
    if plan.learned_map is not None:
        shape = (n // plan.heads, plan.projection_rows, inputs.x_NxFxL.shape[1])
        gradients = gradients._replace(maps=Sides(*[jax.ShapeDtypeStruct(shape, jnp.float32)] * 2))

    def of_tokens(a):
        return pl.BlockSpec((plan.heads, a.shape[1], plan.block), lambda i, j: (i, 0, steps - 1 - j))

    def of_block(a):
        return pl.BlockSpec((plan.heads, 1, *a.shape[2:]), lambda i, j: (i, steps - 1 - j, 0, 0))

    def of_step(a):
        return pl.BlockSpec((1, *a.shape[1:]), lambda i, j: (i, 0, 0))

    gradients = pl.pallas_call(
        functools.partial(_kernel, plan),
        name='linear_attention_backward',
        grid=(n // plan.heads, steps),
        in_specs=[
            jax.tree.map(lambda w: pl.BlockSpec(w.shape, lambda i, j: (0, 0)), maps),
            jax.tree.map(of_tokens, inputs),
            *map(of_tokens, (results.o_NxDxL, do_NxDxL, results.inverse_Nx1xL)),
            jax.tree.map(of_block, results.sums),
            jax.tree.map(lambda a: pl.BlockSpec((plan.heads, *a.shape[1:]), lambda i, j: (i, 0, 0)), after),
        ],
        out_specs=(
            KernelGradients(
                jax.tree.map(of_tokens, gradients.inputs),
                jax.tree.map(of_block, gradients.crossing),
                jax.tree.map(of_step, gradients.maps),
            ),
        ),
        out_shape=(gradients,),
        scratch_shapes=[pltpu.VMEM((plan.heads, *shape), jnp.float32) for shape in (state, moment)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=('parallel', 'arbitrary'), vmem_limit_bytes=plan.vmem_limit_bytes
        ),
        cost_estimate=_estimate_cost(plan, inputs, (inputs, results, do_NxDxL, gradients._replace(maps=None))),
    )(maps, inputs, results.o_NxDxL, do_NxDxL, results.inverse_Nx1xL, results.sums, after)[0]
    if gradients.crossing is None:
        return gradients
    dc = _add_crossing(plan, gradients.inputs.c_Nx1xL, gradients.crossing, features)
    return gradients._replace(inputs=gradients.inputs._replace(c_Nx1xL=dc))


def _add_crossing(plan: TpuPlan, dc_Nx1xL: jax.Array, crossing_NxJx1xP: jax.Array, features: int) -> jax.Array:
    """Completes dc: the last running sum of a block counts for all pairs of a key up to it and a later block's query.

    The sum of all later tokens' dc would be the same, except for rounding. It is the small difference of the tokens'
    gradients as queries and as keys: the longer the window, the less precise it would be.
    """
    if plan.squared:  # a pair of rows of different groups stands for its mirror image too
        crossing_NxJx1xP *= expand(plan, jnp.ones((features, 1), jnp.float32), weighted=True)[:, 0]
    crossing_NxJ = crossing_NxJx1xP.sum((2, 3))
    n, steps = crossing_NxJ.shape
    dc_NxJxT = dc_Nx1xL.reshape(n, steps, plan.block)
    return dc_NxJxT.at[:, :-1, -1].add(crossing_NxJ[:, 1:]).reshape(dc_Nx1xL.shape)


def _estimate_cost(plan: TpuPlan, inputs: KernelInputs, moved: tuple) -> pl.CostEstimate:
    n, head_dim, length = inputs.v_NxDxL.shape
    features = plan.features or inputs.x_NxFxL.shape[1]
    compared = features if inputs.a_NxCxL is None else inputs.a_NxCxL.shape[1]
    rows, columns = plan.state_shape(features, head_dim)
    moment = 14 * features**2 if plan.has_moment else 0
    before = 0 if plan.single_block else 8 * rows * columns + moment
    inside = (3 * compared + 2 * head_dim) * (plan.block + plan.tile)
    inside += (8 if plan.learned_map is None else 12) * plan.projection_rows * inputs.x_NxFxL.shape[1]
    return pl.CostEstimate(
        flops=n * length * (before + inside),
        transcendentals=n * length * (plan.block + plan.tile) // 2 if plan.decay else 0,
        bytes_accessed=sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(moved)),
    )


def _kernel(
    plan: TpuPlan,
    maps: Sides[Ref] | None,
    inputs: KernelInputs,
    o: Ref,
    do: Ref,
    inverse: Ref,
    before: KernelSums[Ref] | None,
    after: KernelSums[Ref] | None,
    gradients: KernelGradients[Ref],
    state: Ref,
    moment: Ref,
) -> None:
    start_sums(state, moment, after, jax.tree.leaves(gradients.maps))
    made = make_of_heads(make_with_gradient, plan, maps, inputs)
    sums, results = (state, moment), ForwardResults(o, inverse, before)
    heads = [HeadGradients(plan, inputs, sums, head, made[head], results, do, gradients) for head in range(plan.heads)]
    inside = ahead([pair for head in heads for pair in head.inside()], 1)
    in_turn(inside, [] if plan.single_block else [piece for head in heads for piece in head.outside()])
