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

from lm.ops.linear_attention.tpu.features import TpuPlan, expand
from lm.ops.linear_attention.tpu.gradients import GradientRefs, HeadGradients
from lm.ops.linear_attention.tpu.head import inputs_of
from lm.ops.linear_attention.tpu.maps import features_and_gradient, of_heads
from lm.ops.tpu.order import ahead, in_turn


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
    crossing = [jax.ShapeDtypeStruct((n, steps, 1, state[1]), jnp.float32)] if _crosses(plan) else []

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
        + [before(a) for a in crossing]
        + [pl.BlockSpec((1, *w.shape[1:]), lambda i, j: (i, 0, 0)) for w in learned],
        out_shape=outputs + crossing + learned,
        scratch_shapes=[pltpu.VMEM((plan.heads, *shape), jnp.float32) for shape in (state, moment)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=('parallel', 'arbitrary'), vmem_limit_bytes=plan.vmem_limit_bytes
        ),
        cost_estimate=_cost(plan, inputs, (*read, *sums, *outputs, *crossing)),
    )(*maps, *read, *sums, *after)
    of_inputs, rest = list(gradients[: len(outputs)]), list(gradients[len(outputs) :])
    if crossing:
        of_inputs[-1] = _with_crossing(plan, of_inputs[-1], rest[0], features)
    return of_inputs, rest[len(crossing) :]


def _crosses(plan: TpuPlan) -> bool:
    """Whether factors have gradients of pairs in different blocks."""
    return plan.decay and not plan.single_block


def _with_crossing(plan: TpuPlan, dc_Nx1xL, crossing_NxJx1xP, features: int) -> jax.Array:
    """dc; the last running sum of a block counts for all pairs of a key up to it and a query of a later block, too.

    The sum of all later tokens' dc would be the same, but for rounding: it is the small difference of what they are as
    queries and as keys, and the longer the window, the less of it would be true.
    """
    if plan.squared:  # a pair of rows of different groups stands for its mirror image too
        crossing_NxJx1xP *= expand(plan, jnp.ones((features, 1), jnp.float32), weighted=True)[:, 0]
    crossing_NxJ = crossing_NxJx1xP.sum((2, 3))
    n, steps = crossing_NxJ.shape
    dc_NxJxT = dc_Nx1xL.reshape(n, steps, plan.block)
    return dc_NxJxT.at[:, :-1, -1].add(crossing_NxJ[:, 1:]).reshape(dc_Nx1xL.shape)


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
    maps, inputs, refs = inputs_of(plan, refs)
    o, do, inverse, *refs = refs
    count = 0 if plan.single_block else 2 if plan.squared and plan.normalize else 1
    sums, after, refs = refs[:count], refs[count : count + given], refs[count + given :]
    dx, dy, dv, *outputs, state, moment = refs
    da_db, outputs = (outputs[:2], outputs[2:]) if plan.exact_local else ((), outputs)
    dc, outputs = (outputs[0], outputs[1:]) if plan.decay else (None, outputs)
    crossing, dmaps = (outputs[0], outputs[1:]) if _crosses(plan) else (None, outputs)

    @pl.when(pl.program_id(1) == 0)
    def _():
        state[...] = after[0][...] if after else jnp.zeros_like(state)
        moment[...] = after[1][...] if len(after) > 1 else jnp.zeros_like(moment)
        for dmap in dmaps:
            dmap[...] = jnp.zeros_like(dmap)

    written = dict(dx=dx, dy=dy, dv=dv, da_db=da_db, dc=dc, dmaps=dmaps, state=state, moment=moment)
    written |= {'crossing': crossing}
    refs = GradientRefs(**inputs, o=o, do=do, inverse=inverse, sums=sums, **written)
    made = of_heads(features_and_gradient, plan, maps, refs.x, refs.y, refs.v.dtype)
    heads = [HeadGradients(plan, refs, head, made[head]) for head in range(plan.heads)]
    inside = ahead([pair for head in heads for pair in head.inside()], 1)
    in_turn(inside, [] if plan.single_block else [piece for head in heads for piece in head.outside()])
