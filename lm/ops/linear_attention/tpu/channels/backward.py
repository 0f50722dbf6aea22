"""The backward kernel of linear attention with a factor per key channel: one sweep from the last chunk to the first.

A chunk's weights P are computed again. The state S before a chunk was saved by the forward kernel, rounded as the
products that read it round it. dX is the gradient of X, and S' is the state after the chunk:

    dV = dO Pᵀ + dS' (K exp(G_C - G))        dP = Vᵀ dO        dS = dS' exp(G_C) + dO (Q exp(G))ᵀ

Other letters are explained in the forward kernel.
"""

import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lm.ops.linear_attention.tpu.channels.plan import ChannelTokens
from lm.ops.tpu import dot
from lm.ops.tpu.channel_pairs import (
    ChannelPairs,
    LevelSums,
    differentiate_sums,
    fold_rows,
    multiply_own,
    pack,
    unpack,
)
from lm.ops.tpu.chunks import ChunkPlan
from lm.ops.tpu.order import Turns, side_by_side


class ChannelGradients(NamedTuple):
    """The results of the backward kernel: gradients of the tokens' arrays and of the states before the first token.

    Inside the kernel they are references.
    """

    tokens: ChannelTokens
    before_NxDxE: Any


def backward(
    plan: ChunkPlan, tokens: ChannelTokens, states_NxTxDxE: jax.Array, do_MxDxL: jax.Array, dafter_NxDxE: jax.Array
) -> ChannelGradients:
    """Computes the gradients.

    Args:
        plan: the plan of the forward kernel.
        tokens: the inputs of the forward kernel.
        states_NxTxDxE: the states that the forward kernel saved.
        do_MxDxL: the gradient of the outputs.
        dafter_NxDxE: the gradient of the states after the last token.
    """
    inputs = (tokens, states_NxTxDxE, do_MxDxL, dafter_NxDxE)
    results = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), ChannelGradients(tokens, dafter_NxDxE))
    specs, whole = plan.specify_tokens(tokens, backwards=True), plan.specify_whole(dafter_NxDxE)
    states, do = (
        plan.specify_states(states_NxTxDxE, backwards=True),
        plan.specify_queries(do_MxDxL, backwards=True),
    )
    heads = tokens.k_NxExL.shape[0]
    return pl.pallas_call(
        functools.partial(_kernel, plan),
        name='channel_attention_backward',
        grid=(heads // plan.heads, plan.steps),
        in_specs=[specs, states, do, whole],
        out_specs=(ChannelGradients(specs, whole),),
        out_shape=(results,),
        scratch_shapes=[pltpu.VMEM((plan.heads // plan.pack, *dafter_NxDxE.shape[1:]), jnp.float32)],
        compiler_params=plan.compiler_params,
        cost_estimate=plan.estimate_cost(2 + 26 * plan.groups, heads, (inputs, results)),
    )(*inputs)[0]


def _kernel(
    plan: ChunkPlan, tokens: ChannelTokens, states: Any, do: Any, dafter: Any, results: ChannelGradients, dstate: Any
) -> None:
    @pl.when(pl.program_id(1) == 0)
    def _():
        dstate[...] = dafter[...]

    refs = _References(tokens, states, do, results.tokens, dstate)
    side_by_side(_differentiate(plan, refs, heads) for heads in plan.packs)

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _():
        results.before_NxDxE[...] = dstate[...]


class _References(NamedTuple):
    """The kernel's arrays in VMEM.

    Attributes:
        tokens: the inputs of a chunk.
        states: the states before the chunk.
        do: the gradient of the chunk's outputs.
        gradients: the gradients of the chunk's inputs, to be written.
        dstate: the gradient of the states after the chunk; it becomes the gradient of the states before the chunk.
    """

    tokens: ChannelTokens
    states: Any
    do: Any
    gradients: ChannelTokens
    dstate: Any


def _differentiate(plan: ChunkPlan, refs: _References, heads: range) -> Turns:
    """Computes the gradients of a pack of key heads and their queries."""
    q, k, v, log = refs.tokens
    dq, dk, dv, dlog = cast(Any, refs.gradients)
    do, at = refs.do, heads.start // plan.pack
    pairs, state, dstate = (
        ChannelPairs([k[n] for n in heads], [log[n] for n in heads]),
        refs.states[at, 0],
        refs.dstate[at],
    )
    dtype, dstate = pairs.dtype, refs.dstate[at]
    groups = [[n * plan.groups + g for n in heads] for g in range(plan.groups)]
    sides = [pack([q[m] for m in group]) for group in groups]
    dstate_operand, k_until = dstate.astype(dtype), pairs.fade(pairs.k, pairs.until)
    dvalues = [dot(pairs.pick(dstate, p).astype(dtype), k_until, (1, 1)) for p in range(plan.pack)]
    dk_until = pairs.merge(dot(v[n], dstate_operand, (0, 0)) for n in heads)
    dweights = [[dot(v[n], do[m], (0, 0)) for n, m in zip(heads, group, strict=True)] for group in groups]
    weights = yield from pairs.weigh(sides)
    for p, n in enumerate(heads):
        dvalue = dvalues[p]
        for group, of_heads in zip(groups, weights, strict=True):
            weight = pairs.add_own(multiply_own(q[group[p]], k[n]), of_heads[p])
            dvalue += dot(do[group[p]], weight.astype(dtype), (1, 1))
        dv[n] = dvalue.astype(dtype)
    gradients = yield from pairs.differentiate(sides, dweights)
    dkeys, dsince = unpack(gradients.keys + dk_until * pairs.until, plan.pack), jnp.float32(0.0)
    dstates = pairs.whole * dstate
    # Through the queries' reads, and through the products of tokens with themselves.
    for group, x, dweight, dside in zip(groups, sides, dweights, gradients.sides, strict=True):
        of_since, x_since = pairs.merge(dot(do[m], state, (0, 0)) for m in group), pairs.fade(x, pairs.since)
        dqueries = unpack(dside + of_since * pairs.since, plan.pack)
        for p, (n, m) in enumerate(zip(heads, group, strict=True)):
            down = pairs.take_own(dweight[p])
            dq[m] = (dqueries[p] + down * k[n].astype(jnp.float32)).astype(dtype)
            dkeys[p] += down * q[m].astype(jnp.float32)
        dsince += of_since * x_since.astype(jnp.float32)
        dstates += pairs.merge(dot(do[m], x_since, (1, 0)) for m in group)
    kept = dstate * state.astype(jnp.float32) * pairs.whole
    duntil = dk_until * k_until.astype(jnp.float32)
    dlogs = differentiate_sums(LevelSums(gradients.levels, dsince, duntil, fold_rows(kept)))
    for n, dkey, of_head in zip(heads, dkeys, unpack(dlogs, plan.pack), strict=True):
        dk[n] = dkey.astype(dtype)
        dlog[n] = of_head
    refs.dstate[at] = dstates
