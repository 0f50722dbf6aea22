"""The forward kernel of linear attention with a factor per key channel.

    O = S (Q exp(G)) + V P        S' = S exp(G_C) + V (K exp(G_C - G))ᵀ        P: `lm.ops.tpu.channel_pairs`

N key heads of all sequences, G queries of each, D value size, E key size. The grid walks over groups of heads and, for
each, over chunks in order, with the states S [D, E] in VMEM. Exponents are sums of logs, at most 0; none is a
difference.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lm.ops.linear_attention.tpu.channels.plan import ChannelTokens
from lm.ops.tpu import dot
from lm.ops.tpu.channel_pairs import ChannelPairs
from lm.ops.tpu.chunks import ChunkPlan
from lm.ops.tpu.order import Turns, side_by_side


class ChannelOutputs(NamedTuple):
    """The results of the forward kernel; inside the kernel they are references.

    Attributes:
        o_MxDxL: outputs of N G heads.
        after_NxDxE: the states after the last token, float32.
        states_NxTxDxE: the states before each of T chunks, in the type of v; None where they are not saved.
    """

    o_MxDxL: Any
    after_NxDxE: Any
    states_NxTxDxE: Any


def forward(plan: ChunkPlan, save: bool, tokens: ChannelTokens, before_NxDxE: jax.Array) -> ChannelOutputs:
    """Computes outputs and states.

    Args:
        plan: the plan; L is a multiple of its chunk, and N of its heads.
        save: also return the states before the chunks.
        tokens: the inputs.
        before_NxDxE: the states before the first token, float32.
    """
    v = tokens.v_NxDxL
    n, size, length = v.shape
    results = ChannelOutputs(
        jax.ShapeDtypeStruct((tokens.q_MxExL.shape[0], size, length), v.dtype),
        jax.ShapeDtypeStruct(before_NxDxE.shape, jnp.float32),
        jax.ShapeDtypeStruct((n, plan.steps, *before_NxDxE.shape[1:]), v.dtype) if save else None,
    )
    return pl.pallas_call(
        functools.partial(_kernel, plan),
        name='channel_attention_forward',
        grid=(n // plan.heads, plan.steps),
        in_specs=[plan.specify_tokens(tokens), plan.specify_whole(before_NxDxE)],
        out_specs=(
            ChannelOutputs(
                plan.specify_queries(results.o_MxDxL),
                plan.specify_whole(before_NxDxE),
                plan.specify_states(results.states_NxTxDxE) if save else None,
            ),
        ),
        out_shape=(results,),
        scratch_shapes=[pltpu.VMEM((plan.heads, *before_NxDxE.shape[1:]), jnp.float32)],
        compiler_params=plan.compiler_params,
        cost_estimate=plan.estimate_cost(1 + 9 * plan.groups, n, (tokens, before_NxDxE, results)),
    )(tokens, before_NxDxE)[0]


def _kernel(plan: ChunkPlan, tokens: ChannelTokens, before: Any, results: ChannelOutputs, state: Any) -> None:
    q, k, v, log = tokens

    @pl.when(pl.program_id(1) == 0)
    def _():
        state[...] = before[...]

    def compute_head(n: int) -> Turns:
        pairs, values = ChannelPairs(k[n], log[n]), v[n]
        queries = range(n * plan.groups, (n + 1) * plan.groups)
        vectors, operand = [q[m] for m in queries], state[n].astype(values.dtype)
        if results.states_NxTxDxE is not None:
            results.states_NxTxDxE[n, 0] = operand
        reads = [dot(operand, pairs.fade(x, pairs.since), (1, 0)) for x in vectors]
        state[n] = pairs.whole * state[n] + dot(values, pairs.fade(pairs.k, pairs.until), (1, 1))
        weights = yield from pairs.weigh(vectors)
        for m, x, read, weight in zip(queries, vectors, reads, weights, strict=True):
            weight = pairs.add_own(x, weight).astype(values.dtype)
            results.o_MxDxL[m] = (read + dot(values, weight, (1, 0))).astype(values.dtype)

    side_by_side(compute_head(n) for n in range(plan.heads))

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _():
        results.after_NxDxE[...] = state[...]
