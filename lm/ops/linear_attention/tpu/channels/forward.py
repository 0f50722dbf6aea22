"""The forward kernel of linear attention with a factor per key channel.

    O = S (Q exp(G)) + V P        S' = S exp(G_C) + V (K exp(G_C - G))ᵀ        P: `lm.ops.tpu.channel_pairs`

N key heads of all sequences, G queries of each, D value size, E channels of a pack of heads. The grid walks over groups
of heads and, for each, over chunks in order, with the states S [D, E] in VMEM. Exponents are sums of logs, at most 0;
none is a difference.
"""

from collections.abc import Iterator
from typing import Any

from lm.ops.tpu import dot
from lm.ops.tpu.channel_pairs import ChannelPairs
from lm.ops.tpu.chunk_walk import WalkOutputs
from lm.ops.tpu.chunks import ChunkPlan, WalkedTokens
from lm.ops.tpu.order import Turns


def compute(plan: ChunkPlan, tokens: WalkedTokens, state: Any, results: WalkOutputs) -> Iterator[Turns]:
    """Yields the work on each pack of heads: outputs of a chunk, and the state after it."""
    q, k, v, _, log, _ = tokens

    def compute_heads(heads: range) -> Turns:
        pairs, at = ChannelPairs([k[n] for n in heads], [log[n] for n in heads]), heads.start // plan.pack
        before = state[at]
        operands = [pairs.pick(before.astype(v.dtype), p) for p in range(plan.pack)]
        if results.states_NxTxDxE is not None:
            results.states_NxTxDxE[at, 0] = before.astype(v.dtype)
        groups = [[n * plan.groups + g for n in heads] for g in range(plan.groups)]
        sides = [pairs.meet([q[m] for m in group]) for group in groups]
        faded = [pairs.fade(side.x, pairs.since) for side in sides]
        reads = [[dot(operand, x, (1, 1)) for operand in operands] for x in faded]
        k_until = pairs.fade(pairs.k, pairs.until)
        state[at] = pairs.whole * before + pairs.merge(dot(v[n], k_until, (1, 0)) for n in heads)
        weights = yield from pairs.weigh(sides)
        for group, of_heads, read in zip(groups, weights, reads, strict=True):
            for p, (n, m) in enumerate(zip(heads, group, strict=True)):
                inside = dot(v[n], of_heads[p].astype(v.dtype), (1, 0))
                results.o_MxDxL[m] = (read[p] + inside).astype(v.dtype)

    return (compute_heads(heads) for heads in plan.packs)
