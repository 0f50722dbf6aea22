"""The forward kernel of the delta rule on TPUs.

N key heads of all sequences, G queries of each, T tokens of a grid step, E key size, D value size. Arrays in HBM are
[N, rows, tokens]. The grid walks over groups of heads and, for each, over the tokens in order, with the states in VMEM.
"""

from collections.abc import Iterator
from typing import Any, cast

import jax

from lm.ops.delta_rule.tpu import channels
from lm.ops.delta_rule.tpu.chunk import Chunk, Vectors
from lm.ops.delta_rule.tpu.plan import DeltaPlan
from lm.ops.tpu import dot
from lm.ops.tpu.chunk_walk import WalkOutputs
from lm.ops.tpu.chunks import WalkedTokens
from lm.ops.tpu.order import Turns


def compute(plan: DeltaPlan, tokens: WalkedTokens, state: Any, results: WalkOutputs) -> Iterator[Turns]:
    """Yields the work on each head, or pack of heads: outputs of a chunk, and the state after it."""
    q, k, v, beta, *_ = tokens

    def compute_head(n: int) -> Turns:
        chunk = Chunk(Vectors(k[n], plan.key_length).x, v[n], cast(jax.Array, beta)[n], tokens.sums(n), state[n])
        if results.states_NxTxDxE is not None:
            results.states_NxTxDxE[n, 0] = chunk.state
        queries = range(n * plan.groups, (n + 1) * plan.groups)
        vectors = [Vectors(q[m], plan.query_length).x for m in queries]
        products = [(dot(chunk.k, x, (0, 0)), dot(chunk.state, x, (1, 0))) for x in vectors]
        yield from chunk.solve()
        if results.inverses_NxTxCxC is not None:
            results.inverses_NxTxCxC[n, 0] = chunk.inverse
        new = chunk.new.astype(chunk.dtype)
        for m, (of_query, read) in zip(queries, products, strict=True):
            inside = dot(new, chunk.weigh(of_query).astype(chunk.dtype), (1, 0))
            results.o_MxDxL[m] = (chunk.since * read + inside).astype(v.dtype)
        added = dot((chunk.until * chunk.new).astype(chunk.dtype), chunk.k, (1, 1))
        state[n] = chunk.whole * state[n] + added

    if plan.channels:
        return (channels.compute_heads(plan, tokens, state, results, heads) for heads in plan.packs)
    return (compute_head(n) for n in range(plan.heads))
