"""A chunk of one head whose key channels have factors of their own, as the forward and the backward kernel compute it.

Formulas and letters are as in `chunk`, products of decayed pairs as in `lm.ops.tpu.channel_pairs`.

    M_ji = β_i Σ_m Σ_e (k_j exp(F_m))_e (k_i exp(F_m))_e          each pair j < i belongs to one level m
"""

from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp

from lm.ops.delta_rule.tpu.chunk import Vectors, sum_rows
from lm.ops.delta_rule.tpu.inverse import inverse
from lm.ops.delta_rule.tpu.plan import DeltaPlan
from lm.ops.tpu import dot
from lm.ops.tpu.channel_pairs import ChannelPairs, LevelSums, differentiate_sums
from lm.ops.tpu.order import Turns


class ChannelChunk(ChannelPairs):
    """The effect of a chunk's tokens on the state and on each other.

    Attributes:
        beta: β, [1, C].
        state: S as an operand, [D, E].
        k_since, k_until: keys times the factors since the start of the chunk, and until its end; operands.
        products: the sums of M before β, [C, C].
        difference: V - S k_since, [D, C] float32.
        inverse: (I + M)⁻¹ as an operand, [C, C].
        new: W, [D, C] float32.
    """

    def __init__(self, k_ExC, v_DxC, beta_1xC, log_ExC, state_DxE):
        super().__init__(k_ExC, log_ExC)
        self.beta, self.state, self._v = beta_1xC, state_DxE.astype(self.dtype), v_DxC
        self.k_since, self.k_until = self.fade(k_ExC, self.since), self.fade(k_ExC, self.until)

    def solve(self, queries: Sequence[jax.Array]) -> Turns:
        """Makes `products`, `difference`, `inverse` and `new`; returns P of each of the queries, float32."""
        read = dot(self.state, self.k_since, (1, 0))
        self.products, *weights = yield from self.weigh([self.k, *queries])
        self.difference = self._v.astype(jnp.float32) - read
        solved = yield from inverse(self.products * self.beta, split=self.dtype != jnp.float32)
        self.inverse = solved.astype(self.dtype)
        self.new = dot((self.beta * self.difference).astype(self.dtype), self.inverse, (1, 0))
        yield
        return [self.add_own(x, weight) for x, weight in zip(queries, weights, strict=True)]


def compute_head(plan: DeltaPlan, tokens: Any, state: Any, results: Any, n: int) -> Turns:
    """Computes the outputs of key head n and the state after the chunk; arguments as in the forward kernel."""
    q, k, v, beta, logs = tokens
    chunk = ChannelChunk(Vectors(k[n], plan.key_length).x, v[n], beta[n], logs[n], state[n])
    if results.states_NxTxDxE is not None:
        results.states_NxTxDxE[n, 0] = chunk.state
    queries = range(n * plan.groups, (n + 1) * plan.groups)
    vectors = [Vectors(q[m], plan.query_length).x for m in queries]
    reads = [dot(chunk.state, chunk.fade(x, chunk.since), (1, 0)) for x in vectors]
    weights = yield from chunk.solve(vectors)
    new = chunk.new.astype(chunk.dtype)
    for m, weight, read in zip(queries, weights, reads, strict=True):
        results.o_MxDxL[m] = (read + dot(new, weight.astype(chunk.dtype), (1, 0))).astype(v.dtype)
    state[n] = chunk.whole * state[n] + dot(new, chunk.k_until, (1, 1))


def differentiate_head(plan: DeltaPlan, refs: Any, n: int) -> Turns:
    """Computes the gradients of key head n and its queries; arguments as in the backward kernel."""
    q, k, v, beta, logs = refs.tokens
    dq, dk, dv, dbeta, dlogs = cast(Any, refs.gradients)
    do, dstate = refs.do, refs.dstate
    keys = Vectors(k[n], plan.key_length)
    chunk = ChannelChunk(keys.x, v[n], beta[n], logs[n], refs.states[n, 0])
    dtype = chunk.dtype
    queries = range(n * plan.groups, (n + 1) * plan.groups)
    vectors = [Vectors(q[m], plan.query_length) for m in queries]
    dstate_operand = dstate[n].astype(dtype)
    dnew = dot(dstate_operand, chunk.k_until, (1, 0))
    weights = yield from chunk.solve([each.x for each in vectors])
    # First dW, then dR, dM and dP.
    new = chunk.new.astype(dtype)
    for m, weight in zip(queries, weights, strict=True):
        dnew += dot(do[m], weight.astype(dtype), (1, 1))
    yield
    dgiven = dot(dnew.astype(dtype), chunk.inverse, (1, 1))
    yield
    dsystem = -dot(new, dgiven.astype(dtype), (0, 0))
    dweights = [dot(new, do[m], (0, 0)) for m in queries]
    # Through R: the gradients of v and β, and of S and k through the difference.
    ddifference = chunk.beta * dgiven
    dv[n] = ddifference.astype(dtype)
    dread = (-ddifference).astype(dtype)
    yield
    dbeta[n] = sum_rows(dgiven * chunk.difference) + sum_rows(dsystem * chunk.products)
    dk_since = dot(chunk.state, dread, (0, 0))
    dk_until = dot(dstate_operand, new, (0, 0))
    dstates = chunk.whole * dstate[n] + dot(dread, chunk.k_since, (1, 1))
    dpairs = [dsystem * chunk.beta, *dweights]
    gradients = yield from chunk.differentiate([chunk.k, *(each.x for each in vectors)], dpairs)
    dkeys = gradients.keys + gradients.sides[0] + dk_since * chunk.since + dk_until * chunk.until
    dsince = dk_since * chunk.k_since.astype(jnp.float32)
    # Through the queries' reads, and through the products of tokens with themselves.
    for m, each, dweight, dside in zip(queries, vectors, dweights, gradients.sides[1:], strict=True):
        of_since, x = dot(chunk.state, do[m], (0, 0)), chunk.fade(each.x, chunk.since)
        down = chunk.take_own(dweight)
        dquery = dside + of_since * chunk.since + down * chunk.k.astype(jnp.float32)
        dq[m] = each.backwards(dquery).astype(dtype)
        dkeys += down * each.x.astype(jnp.float32)
        dsince += of_since * x.astype(jnp.float32)
        dstates += dot(do[m], x, (1, 1))
    dk[n] = keys.backwards(dkeys).astype(dtype)
    dsince += chunk.differentiate_whole(dstate[n] * chunk.state.astype(jnp.float32) * chunk.whole)
    duntil = dk_until * chunk.k_until.astype(jnp.float32)
    sums = LevelSums(gradients.levels, dsince, duntil, jnp.zeros_like(dsince))
    dlogs[n] = differentiate_sums(sums)
    dstate[n] = dstates
