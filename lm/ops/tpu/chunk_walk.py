"""The walk of a kernel over a sequence, chunk by chunk, and the walk back for the gradients.

N key heads of all sequences, G queries of each, D value size, E channels of a pack of heads. The grid walks over groups
of heads and, for each, over chunks in order, with the states [D, E] in VMEM. The walk back starts at the last chunk. It
computes each chunk again from the state before it, which the first walk saved. A plan may save inverses too.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lm.ops.custom_vjp import custom_vjp
from lm.ops.residuals import save_residual
from lm.ops.tpu.chunks import CHUNK, ChunkPlan, WalkedTokens
from lm.ops.tpu.order import Turns, side_by_side

Held = TypeVar('Held')
Plan = TypeVar('Plan', bound=ChunkPlan)


class WalkOutputs(NamedTuple, Generic[Held]):
    """The results of the forward kernel, references to them, or specs of them.

    Attributes:
        o_MxDxL: outputs of N G heads.
        after_NxDxE: the states after the last token, float32.
        states_NxTxDxE: the states before each of T chunks, in the type of v; None where they are not saved.
        inverses_NxTxCxC: the inverse of each chunk's system, in the type of v; None where it is not saved.
    """

    o_MxDxL: Held
    after_NxDxE: Held
    states_NxTxDxE: Held | None
    inverses_NxTxCxC: Held | None


class ChunkReferences(NamedTuple):
    """The arrays of the backward kernel in VMEM.

    Attributes:
        tokens: the inputs of a chunk.
        states: the states before the chunk.
        inverses: the inverses of the chunk's system; None where the forward kernel saved none.
        do: the gradient of the chunk's outputs.
        gradients: the gradients of the chunk's inputs, to be written.
        dstate: the gradient of the states after the chunk; it becomes the gradient of the states before the chunk.
    """

    tokens: WalkedTokens
    states: jax.Ref
    inverses: jax.Ref | None
    do: jax.Ref
    gradients: WalkedTokens
    dstate: jax.Ref


@dataclasses.dataclass(frozen=True)
class ChunkWalk(Generic[Plan]):
    """The parts in which walks differ.

    Attributes:
        name: the beginning of the names of both kernels.
        compute: (plan, tokens, state, results) → the work on a chunk's heads, which writes outputs and the next state.
        differentiate: (plan, references) → the work on a chunk's heads, which writes gradients.
        forward_rows, backward_rows: plan → matrix products per chunk and head (`ChunkPlan.estimate_cost`).
    """

    name: str
    compute: Callable[[Plan, WalkedTokens, jax.Ref, WalkOutputs[jax.Ref]], Iterable[Turns]]
    differentiate: Callable[[Plan, ChunkReferences], Iterable[Turns]]
    forward_rows: Callable[[Plan], int]
    backward_rows: Callable[[Plan], int]


def run_walk(
    walk: ChunkWalk[Plan], plan: Plan, tokens: WalkedTokens, state_BxKxExD: jax.Array, rows: tuple[int, int]
) -> tuple[jax.Array, jax.Array]:
    """Computes outputs [N G, D, L], and the states after the last token, [B, K, E, D] float32.

    Args:
        walk: the kernels.
        plan: the plan; L is a multiple of its chunk, and N of its heads.
        tokens: the inputs.
        state_BxKxExD: the states before the first token, float32.
        rows: the padded sizes of keys and values in the kernels.
    """
    batch, heads, size, value_size = state_BxKxExD.shape
    key_rows, value_rows = rows
    before_BxKxDxE = jnp.pad(
        state_BxKxExD.swapaxes(2, 3), ((0, 0), (0, 0), (0, value_rows - value_size), (0, key_rows - size))
    )
    before_NxDxE = before_BxKxDxE.reshape(batch * heads, value_rows, key_rows)
    o_MxDxL, after_NxDxE = _walk(walk, plan, tokens, plan.pack_states(before_NxDxE))
    after_BxKxDxE = plan.unpack_states(after_NxDxE).reshape(batch, heads, value_rows, key_rows)
    return o_MxDxL, after_BxKxDxE[:, :, :value_size, :size].swapaxes(2, 3)


@custom_vjp(0, 1)
def _walk(walk: ChunkWalk, plan: ChunkPlan, tokens: WalkedTokens, before_NxDxE: jax.Array):
    """Returns outputs, and the states after the last token [N, D, E]."""
    results = _run_forward(walk, plan, False, tokens, before_NxDxE)
    return results.o_MxDxL, results.after_NxDxE


def _walk_forward(walk: ChunkWalk, plan: ChunkPlan, tokens: WalkedTokens, before_NxDxE: jax.Array):
    o, after, *saved = _run_forward(walk, plan, True, tokens, before_NxDxE)
    return (save_residual(o), after), (tokens, *jax.tree.map(save_residual, saved))


def _walk_backward(walk: ChunkWalk, plan: ChunkPlan, residuals, cotangents):
    return _run_backward(walk, plan, *residuals, *cotangents)


_walk.defvjp(_walk_forward, _walk_backward)


def _run_forward(walk: ChunkWalk, plan: ChunkPlan, save: bool, tokens: WalkedTokens, before_NxDxE) -> WalkOutputs:
    v = tokens.v_NxDxL
    n, size, length = v.shape
    results = WalkOutputs(
        jax.ShapeDtypeStruct((tokens.q_MxExL.shape[0], size, length), v.dtype),
        jax.ShapeDtypeStruct(before_NxDxE.shape, jnp.float32),
        jax.ShapeDtypeStruct((len(before_NxDxE), plan.steps, *before_NxDxE.shape[1:]), v.dtype) if save else None,
        jax.ShapeDtypeStruct((n, plan.steps, CHUNK, CHUNK), v.dtype) if save and plan.keeps_inverses else None,
    )
    return pl.pallas_call(
        functools.partial(_forward_kernel, walk, plan),
        name=f'{walk.name}_forward',
        grid=(n // plan.heads, plan.steps),
        in_specs=[plan.specify_tokens(tokens), plan.specify_whole(before_NxDxE)],
        out_specs=(
            WalkOutputs(
                plan.specify_queries(results.o_MxDxL),
                plan.specify_whole(before_NxDxE),
                plan.specify_states(results.states_NxTxDxE) if save else None,
                jax.tree.map(plan.specify_inverses, results.inverses_NxTxCxC),
            ),
        ),
        out_shape=(results,),
        scratch_shapes=[pltpu.VMEM((plan.heads // plan.pack, *before_NxDxE.shape[1:]), jnp.float32)],
        compiler_params=plan.compiler_params,
        cost_estimate=plan.estimate_cost(walk.forward_rows(plan), n, (tokens, before_NxDxE, results)),
    )(tokens, before_NxDxE)[0]


def _forward_kernel(
    walk: ChunkWalk,
    plan: ChunkPlan,
    tokens: WalkedTokens,
    before: jax.Ref,
    results: WalkOutputs[jax.Ref],
    state: jax.Ref,
) -> None:
    @pl.when(pl.program_id(1) == 0)
    def _():
        state[...] = before[...]

    side_by_side(walk.compute(plan, tokens, state, results))

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _():
        results.after_NxDxE[...] = state[...]


def _run_backward(
    walk: ChunkWalk,
    plan: ChunkPlan,
    tokens: WalkedTokens,
    states_NxTxDxE: jax.Array,
    inverses_NxTxCxC: jax.Array | None,
    do_MxDxL: jax.Array,
    dafter_NxDxE: jax.Array,
) -> tuple[WalkedTokens, jax.Array]:
    """Returns the gradients of the tokens' arrays and of the states before the first token."""
    inputs = (tokens, states_NxTxDxE, inverses_NxTxCxC, do_MxDxL, dafter_NxDxE)
    results = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (tokens, dafter_NxDxE))
    specs, whole = plan.specify_tokens(tokens, backwards=True), plan.specify_whole(dafter_NxDxE)
    states, do = (
        plan.specify_states(states_NxTxDxE, backwards=True),
        plan.specify_queries(do_MxDxL, backwards=True),
    )
    inverses = jax.tree.map(functools.partial(plan.specify_inverses, backwards=True), inverses_NxTxCxC)
    heads = tokens.k_NxExL.shape[0]
    return pl.pallas_call(
        functools.partial(_backward_kernel, walk, plan),
        name=f'{walk.name}_backward',
        grid=(heads // plan.heads, plan.steps),
        in_specs=[specs, states, inverses, do, whole],
        out_specs=((specs, whole),),
        out_shape=(results,),
        scratch_shapes=[pltpu.VMEM((plan.heads // plan.pack, *dafter_NxDxE.shape[1:]), jnp.float32)],
        compiler_params=plan.compiler_params,
        cost_estimate=plan.estimate_cost(walk.backward_rows(plan), heads, (inputs, results)),
    )(*inputs)[0]


def _backward_kernel(
    walk: ChunkWalk,
    plan: ChunkPlan,
    tokens: WalkedTokens,
    states: jax.Ref,
    inverses: jax.Ref | None,
    do: jax.Ref,
    dafter: jax.Ref,
    results: tuple[WalkedTokens, jax.Ref],
    dstate: jax.Ref,
) -> None:
    dtokens, dbefore = results

    @pl.when(pl.program_id(1) == 0)
    def _():
        dstate[...] = dafter[...]

    side_by_side(walk.differentiate(plan, ChunkReferences(tokens, states, inverses, do, dtokens, dstate)))

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _():
        dbefore[...] = dstate[...]
