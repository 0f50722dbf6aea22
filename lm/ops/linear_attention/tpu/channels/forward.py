"""The forward kernel of linear attention with a factor per key channel.

    O = S (Q exp(G)) + V P        S' = S exp(G_C) + V (K exp(G_C - G))ᵀ        P: `lm.ops.tpu.channel_pairs`

N key heads of all sequences, G queries of each, D value size, E channels of a pack of heads. The grid walks over groups
of heads and, for each, over chunks in order, with the states S [D, E] in VMEM. Exponents are sums of logs, at most 0;
none is a difference.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lm.ops.linear_attention.tpu.channels.plan import ChannelTokens
from lm.ops.tpu import dot
from lm.ops.tpu.channel_pairs import ChannelPairs, multiply_own, pack
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
        jax.ShapeDtypeStruct((len(before_NxDxE), plan.steps, *before_NxDxE.shape[1:]), v.dtype) if save else None,
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
        scratch_shapes=[pltpu.VMEM((plan.heads // plan.pack, *before_NxDxE.shape[1:]), jnp.float32)],
        compiler_params=plan.compiler_params,
        cost_estimate=plan.estimate_cost(1 + 9 * plan.groups, n, (tokens, before_NxDxE, results)),
    )(tokens, before_NxDxE)[0]


def _kernel(plan: ChunkPlan, tokens: ChannelTokens, before: Any, results: ChannelOutputs, state: Any) -> None:
    q, k, v, log = tokens

    @pl.when(pl.program_id(1) == 0)
    def _():
        state[...] = before[...]

    def compute_heads(heads: range) -> Turns:
        pairs, at = ChannelPairs([k[n] for n in heads], [log[n] for n in heads]), heads.start // plan.pack
        before = state[at]
        operands = [pairs.pick(before, p).astype(v.dtype) for p in range(plan.pack)]
        if results.states_NxTxDxE is not None:
            results.states_NxTxDxE[at, 0] = before.astype(v.dtype)
        groups = [[n * plan.groups + g for n in heads] for g in range(plan.groups)]
        sides = [pack([q[m] for m in group]) for group in groups]
        faded = [pairs.fade(x, pairs.since) for x in sides]
        reads = [[dot(operand, x, (1, 1)) for operand in operands] for x in faded]
        k_until = pairs.fade(pairs.k, pairs.until)
        state[at] = pairs.whole * before + pairs.merge(dot(v[n], k_until, (1, 0)) for n in heads)
        weights = yield from pairs.weigh(sides)
        for group, of_heads, read in zip(groups, weights, reads, strict=True):
            for p, (n, m) in enumerate(zip(heads, group, strict=True)):
                weight = pairs.add_own(multiply_own(q[m], k[n]), of_heads[p]).astype(v.dtype)
                results.o_MxDxL[m] = (read[p] + dot(v[n], weight, (1, 0))).astype(v.dtype)

    side_by_side(compute_heads(heads) for heads in plan.packs)

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _():
        results.after_NxDxE[...] = state[...]
