"""The forward kernel of the delta rule on TPUs.

N key heads of all sequences, G queries of each, T tokens of a grid step, E key size, D value size. Arrays in HBM are
[N, rows, tokens]. The grid walks over groups of heads and, for each, over the tokens in order, with the states in VMEM.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lm.ops.delta_rule.tpu import channels
from lm.ops.delta_rule.tpu.chunk import Chunk, Vectors
from lm.ops.delta_rule.tpu.plan import DeltaPlan, DeltaTokens
from lm.ops.tpu import dot
from lm.ops.tpu.order import Turns, side_by_side


class ForwardStates(NamedTuple):
    """The results of the forward kernel; inside the kernel they are references.

    Attributes:
        o_MxDxL: outputs of N G heads.
        after_NxDxE: the states after the last token, float32.
        states_NxTxDxE: the states before each of T chunks, in the type of v; None where they are not saved.
    """

    o_MxDxL: Any
    after_NxDxE: Any
    states_NxTxDxE: Any


def forward(plan: DeltaPlan, save: bool, tokens: DeltaTokens, before_NxDxE: jax.Array) -> ForwardStates:
    """Computes outputs and states.

    Args:
        plan: the plan; L is a multiple of its chunk, and N of its heads.
        save: also return the states before the chunks.
        tokens: the inputs.
        before_NxDxE: the states before the first token, float32.
    """
    v = tokens.v_NxDxL
    n, size, length = v.shape
    results = ForwardStates(
        jax.ShapeDtypeStruct((tokens.q_MxExL.shape[0], size, length), v.dtype),
        jax.ShapeDtypeStruct(before_NxDxE.shape, jnp.float32),
        jax.ShapeDtypeStruct((len(before_NxDxE), plan.steps, *before_NxDxE.shape[1:]), v.dtype) if save else None,
    )
    return pl.pallas_call(
        functools.partial(_kernel, plan),
        name='delta_rule_forward',
        grid=(n // plan.heads, plan.steps),
        in_specs=[plan.specify_tokens(tokens), plan.specify_whole(before_NxDxE)],
        out_specs=(
            ForwardStates(
                plan.specify_queries(results.o_MxDxL),
                plan.specify_whole(before_NxDxE),
                plan.specify_states(results.states_NxTxDxE) if save else None,
            ),
        ),
        out_shape=(results,),
        scratch_shapes=[pltpu.VMEM((plan.heads // plan.pack, *before_NxDxE.shape[1:]), jnp.float32)],
        compiler_params=plan.compiler_params,
        cost_estimate=plan.estimate_cost(4 + 3 * plan.groups, n, (tokens, before_NxDxE, results)),
    )(tokens, before_NxDxE)[0]


def _kernel(plan: DeltaPlan, tokens: DeltaTokens, before: Any, results: ForwardStates, state: Any) -> None:
    q, k, v, beta, c = tokens

    @pl.when(pl.program_id(1) == 0)
    def _():
        state[...] = before[...]

    def compute_head(n: int) -> Turns:
        chunk = Chunk(Vectors(k[n], plan.key_length).x, v[n], beta[n], c[n], state[n])
        if results.states_NxTxDxE is not None:
            results.states_NxTxDxE[n, 0] = chunk.state
        queries = range(n * plan.groups, (n + 1) * plan.groups)
        vectors = [Vectors(q[m], plan.query_length).x for m in queries]
        products = [(dot(chunk.k, x, (0, 0)), dot(chunk.state, x, (1, 0))) for x in vectors]
        yield from chunk.solve()
        new = chunk.new.astype(chunk.dtype)
        for m, (of_query, read) in zip(queries, products, strict=True):
            inside = dot(new, chunk.weigh(of_query).astype(chunk.dtype), (1, 0))
            results.o_MxDxL[m] = (chunk.since * read + inside).astype(v.dtype)
        added = dot((chunk.until * chunk.new).astype(chunk.dtype), chunk.k, (1, 1))
        state[n] = chunk.whole * state[n] + added

    if plan.channels:
        side_by_side(channels.compute_heads(plan, tokens, state, results, heads) for heads in plan.packs)
    else:
        side_by_side(compute_head(n) for n in range(plan.heads))

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _():
        results.after_NxDxE[...] = state[...]
