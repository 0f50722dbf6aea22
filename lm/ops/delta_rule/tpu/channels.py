"""A chunk of a pack of heads whose key channels have factors of their own, for the forward and the backward kernel.

Formulas and letters are as in `chunk`, products of decayed pairs as in `lm.ops.tpu.channel_pairs`. States of a pack lie
side by side on the lanes, [D, E] with all channels E of the pack.

    M_ji = β_i Σ_m Σ_e (k_j exp(F_m))_e (k_i exp(F_m))_e          each pair j < i belongs to one level m
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from lm.ops.delta_rule.tpu.chunk import Vectors, sum_rows
from lm.ops.delta_rule.tpu.inverse import inverse
from lm.ops.delta_rule.tpu.plan import DeltaPlan
from lm.ops.tpu import dot
from lm.ops.tpu.channel_pairs import (
    ChannelPairs,
    Side,
    SumGradients,
    fold_rows,
    unpack,
)
from lm.ops.tpu.chunk_walk import ChunkReferences, WalkOutputs
from lm.ops.tpu.chunks import WalkedTokens
from lm.ops.tpu.order import Turns, together

LEAST_BETA = 2.0**-60
"""A token with this β adds less than float32 numbers of size 1 can show, and its W is far above the least float32."""

Ref = Any
"""A reference to an array in VMEM, inside a kernel."""


class ChannelChunk(ChannelPairs):
    """The effect of a chunk's tokens on the states and on each other.

    Attributes:
        state: S as an operand, [D, E].
        k_since, k_until: keys times the factors since the start of the chunk, and until its end; operands, [C, E].
    """

    def __init__(self, keys: Sequence[jax.Array], log_ExC: Sequence[jax.Array], state_DxE: jax.Array):
        super().__init__(keys, log_ExC)
        self.state = state_DxE.astype(self.dtype)
        self._states = [self.pick(self.state, p) for p in range(self.heads)]
        self.k_since, self.k_until = self.fade(self.k, self.since), self.fade(self.k, self.until)

    def read(self, p: int, x_CxE: jax.Array) -> jax.Array:
        """Returns the product of head p's state with its vectors, an operand; [D, C]."""
        return dot(self._states[p], x_CxE, (1, 1))

    def give(self, p: int, v_DxC: jax.Array, beta_1xC: jax.Array) -> jax.Array:
        """Returns β (V - S k_since) of head p, an operand [D, C]."""
        return (beta_1xC * (v_DxC.astype(jnp.float32) - self.read(p, self.k_since))).astype(self.dtype)

    def solve(self, given_DxC: jax.Array, m_CxC: jax.Array) -> Turns:
        """Returns (I + M)⁻¹ as an operand, [C, C], and W, [D, C] float32, of a head with what `give` returns."""
        solved = yield from inverse(m_CxC, split=self.dtype != jnp.float32)
        operand = solved.astype(self.dtype)
        new = dot(given_DxC, operand, (1, 0))
        yield
        return operand, new


class PackedQueries(NamedTuple):
    """The queries of a pack, for each of the G queries that share a key.

    Attributes:
        numbers: the number of each head's queries in the grid step.
        vectors: the queries of each head.
        side: the queries of all heads.
    """

    numbers: list[int]
    vectors: list[Vectors]
    side: Side


def _pack_queries(plan: DeltaPlan, chunk: ChannelChunk, q: Ref, heads: range) -> list[PackedQueries]:
    packed = []
    for g in range(plan.groups):
        numbers = [n * plan.groups + g for n in heads]
        vectors = [Vectors(q[m], plan.query_length) for m in numbers]
        packed.append(PackedQueries(numbers, vectors, chunk.meet([each.x for each in vectors])))
    return packed


def _read_betas(tokens: WalkedTokens, heads: range) -> list[jax.Array]:
    """Returns β of each head of a pack, nowhere 0: W ÷ β, which its gradient reads, is then a number."""
    betas = [cast(jax.Array, tokens.beta_Nx1xL)[n] for n in heads]
    return [jnp.where(jnp.abs(beta) < LEAST_BETA, LEAST_BETA, beta) for beta in betas]


def compute_heads(plan: DeltaPlan, tokens: WalkedTokens, state: Ref, results: WalkOutputs, heads: range) -> Turns:
    """Computes outputs of a pack of key heads, and states after the chunk; arguments as in the forward kernel."""
    q, k, v, _, logs, _ = tokens
    betas = _read_betas(tokens, heads)
    at = heads.start // plan.pack
    keys = [Vectors(k[n], plan.key_length).x for n in heads]
    chunk = ChannelChunk(keys, [logs[n] for n in heads], state[at])
    if results.states_NxTxDxE is not None:
        results.states_NxTxDxE[at, 0] = chunk.state
    queries = _pack_queries(plan, chunk, q, heads)
    faded = [chunk.fade(each.side.x, chunk.since) for each in queries]
    reads = [[chunk.read(p, x) for p in range(plan.pack)] for x in faded]
    given = [chunk.give(p, v[n], betas[p]) for p, n in enumerate(heads)]
    products, *weights = yield from chunk.weigh([chunk.keys, *(each.side for each in queries)])
    solved = yield from together(map(chunk.solve, given, [x * beta for x, beta in zip(products, betas, strict=True)]))
    if results.inverses_NxTxCxC is not None:
        for n, (solution, _) in zip(heads, solved, strict=True):
            results.inverses_NxTxCxC[n, 0] = solution
    news = [new.astype(chunk.dtype) for _, new in solved]
    for group, of_heads, read in zip(queries, weights, reads, strict=True):
        for p, m in enumerate(group.numbers):
            inside = dot(news[p], of_heads[p].astype(chunk.dtype), (1, 0))
            results.o_MxDxL[m] = (read[p] + inside).astype(v.dtype)
    state[at] = chunk.whole * state[at] + chunk.merge(dot(new, chunk.k_until, (1, 0)) for new in news)


def differentiate_heads(plan: DeltaPlan, refs: ChunkReferences, heads: range) -> Turns:
    """Computes the gradients of a pack of key heads and their queries; arguments as in the backward kernel."""
    q, k, v, _, logs, _ = refs.tokens
    betas, inverses = _read_betas(refs.tokens, heads), cast(jax.Ref, refs.inverses)
    dq, dk, dv, dbeta, dlogs, _ = refs.gradients
    do, at = refs.do, heads.start // plan.pack
    keys = [Vectors(k[n], plan.key_length) for n in heads]
    chunk = ChannelChunk([each.x for each in keys], [logs[n] for n in heads], refs.states[at, 0])
    dtype, dstate = chunk.dtype, refs.dstate[at]
    queries = _pack_queries(plan, chunk, q, heads)
    sides = [each.side for each in queries]
    dstate_operand = dstate.astype(dtype)
    folded = [dot(chunk.pick(dstate_operand, p), chunk.k_until, (1, 1)) for p in range(plan.pack)]
    given = [chunk.give(p, v[n], betas[p]) for p, n in enumerate(heads)]
    weights = yield from chunk.weigh(sides)
    solved = [dot(x, inverses[n, 0], (1, 0)) for x, n in zip(given, heads, strict=True)]
    # First dW, then dR, dM and dP.
    news, dgivens = [new.astype(dtype) for new in solved], []
    for p in range(plan.pack):
        dnew = folded[p]
        for group, of_heads in zip(queries, weights, strict=True):
            dnew += dot(do[group.numbers[p]], of_heads[p].astype(dtype), (1, 1))
        folded[p] = dnew
    yield
    for n, dnew in zip(heads, folded, strict=True):
        dgivens.append(dot(dnew.astype(dtype), inverses[n, 0], (1, 1)))
    yield
    dweights = [[dot(news[p], do[m], (0, 0)) for p, m in enumerate(group.numbers)] for group in queries]
    # Through R: the gradients of v and β, and of S and k through the difference.
    dreads, dproducts = [], []
    for p, (n, new, dgiven) in enumerate(zip(heads, solved, dgivens, strict=True)):
        dsystem = -dot(news[p], dgiven.astype(dtype), (0, 0))
        ddifference = betas[p] * dgiven
        dv[n] = ddifference.astype(dtype)
        dreads.append((-ddifference).astype(dtype))
        # Of dR · R and dM · M both: ⟨dR, R - W M⟩ / β, and R - W M = W.
        cast(jax.Ref, dbeta)[n] = sum_rows(dgiven * new) / betas[p]
        dproducts.append(dsystem * betas[p])
    yield
    dk_since = chunk.merge(dot(dread, chunk.state, (0, 0)) for dread in dreads)
    dk_until = chunk.merge(dot(new, dstate_operand, (0, 0)) for new in news)
    dstates = chunk.whole * dstate + chunk.merge(dot(dread, chunk.k_since, (1, 0)) for dread in dreads)
    # Through the queries' reads.
    dsince, reads = dk_since * chunk.k_since.astype(jnp.float32), []
    for group in queries:
        of_since = chunk.merge(dot(do[m], chunk.state, (0, 0)) for m in group.numbers)
        x_since = chunk.fade(group.side.x, chunk.since)
        reads.append(of_since * chunk.since)
        dsince += of_since * x_since.astype(jnp.float32)
        dstates += chunk.merge(dot(do[m], x_since, (1, 0)) for m in group.numbers)
    kept = dstate * chunk.state.astype(jnp.float32) * chunk.whole
    duntil = dk_until * chunk.k_until.astype(jnp.float32)
    refs.dstate[at] = dstates
    dsums = SumGradients(dsince, duntil, fold_rows(kept))
    dkeys, dsides, dlog = yield from chunk.differentiate([chunk.keys, *sides], [dproducts, *dweights], dsums)
    dkeys = unpack(dkeys + dk_since * chunk.since + dk_until * chunk.until, plan.pack)
    for group, dside, read in zip(queries, dsides, reads, strict=True):
        dqueries = unpack(dside + read, plan.pack)
        for p, (m, each) in enumerate(zip(group.numbers, group.vectors, strict=True)):
            dq[m] = each.backwards(dqueries[p]).astype(dtype)
    for n, key, dkey, of_head in zip(heads, keys, dkeys, unpack(dlog, plan.pack), strict=True):
        dk[n] = key.backwards(dkey).astype(dtype)
        dlogs[n] = of_head
