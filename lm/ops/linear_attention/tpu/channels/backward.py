"""The backward kernel of linear attention with a factor per key channel: one sweep from the last chunk to the first.

A chunk's weights P are computed again. The state S before a chunk was saved by the forward kernel, rounded as the
products that read it round it. dX is the gradient of X, and S' is the state after the chunk:

    dV = dO Pᵀ + dS' (K exp(G_C - G))        dP = Vᵀ dO        dS = dS' exp(G_C) + dO (Q exp(G))ᵀ

Other letters are explained in the forward kernel.
"""

from collections.abc import Iterator

import jax.numpy as jnp

from lm.ops.tpu import dot
from lm.ops.tpu.channel_pairs import (
    ChannelPairs,
    SumGradients,
    fold_rows,
    unpack,
)
from lm.ops.tpu.chunk_walk import ChunkReferences
from lm.ops.tpu.chunks import ChunkPlan
from lm.ops.tpu.order import Turns


def differentiate(plan: ChunkPlan, refs: ChunkReferences) -> Iterator[Turns]:
    """Yields the work on each pack of heads: the gradients of a chunk."""
    return (_differentiate(plan, refs, heads) for heads in plan.packs)


def _differentiate(plan: ChunkPlan, refs: ChunkReferences, heads: range) -> Turns:
    """Computes the gradients of a pack of key heads and their queries."""
    q, k, v, _, log, _ = refs.tokens
    dq, dk, dv, _, dlogs, _ = refs.gradients
    do, at = refs.do, heads.start // plan.pack
    pairs, state, dstate = (
        ChannelPairs([k[n] for n in heads], [log[n] for n in heads]),
        refs.states[at, 0],
        refs.dstate[at],
    )
    dtype, dstate = pairs.dtype, refs.dstate[at]
    groups = [[n * plan.groups + g for n in heads] for g in range(plan.groups)]
    sides = [pairs.meet([q[m] for m in group]) for group in groups]
    dstate_operand, k_until = dstate.astype(dtype), pairs.fade(pairs.k, pairs.until)
    dvalues = [dot(pairs.pick(dstate_operand, p), k_until, (1, 1)) for p in range(plan.pack)]
    dk_until = pairs.merge(dot(v[n], dstate_operand, (0, 0)) for n in heads)
    dweights = [[dot(v[n], do[m], (0, 0)) for n, m in zip(heads, group, strict=True)] for group in groups]
    weights = yield from pairs.weigh(sides)
    for p, n in enumerate(heads):
        dvalue = dvalues[p]
        for group, of_heads in zip(groups, weights, strict=True):
            dvalue += dot(do[group[p]], of_heads[p].astype(dtype), (1, 1))
        dv[n] = dvalue.astype(dtype)
    dsince, dstates, reads = jnp.float32(0.0), pairs.whole * dstate, []
    # Through the queries' reads.
    for group, side in zip(groups, sides, strict=True):
        of_since, x_since = pairs.merge(dot(do[m], state, (0, 0)) for m in group), pairs.fade(side.x, pairs.since)
        reads.append(of_since * pairs.since)
        dsince += of_since * x_since.astype(jnp.float32)
        dstates += pairs.merge(dot(do[m], x_since, (1, 0)) for m in group)
    kept = dstate * state.astype(jnp.float32) * pairs.whole
    duntil = dk_until * k_until.astype(jnp.float32)
    refs.dstate[at] = dstates
    dkeys, dsides, dlog = yield from pairs.differentiate(sides, dweights, SumGradients(dsince, duntil, fold_rows(kept)))
    dkeys = unpack(dkeys + dk_until * pairs.until, plan.pack)
    for group, dside, read in zip(groups, dsides, reads, strict=True):
        dqueries = unpack(dside + read, plan.pack)
        for p, m in enumerate(group):
            dq[m] = dqueries[p].astype(dtype)
    for n, dkey, of_head in zip(heads, dkeys, unpack(dlog, plan.pack), strict=True):
        dk[n] = dkey.astype(dtype)
        dlogs[n] = of_head
