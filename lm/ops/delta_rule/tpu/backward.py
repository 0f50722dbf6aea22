"""The backward kernel of the delta rule on TPUs: one sweep from the last chunk to the first.

A chunk is computed again from the state before it and its inverse, which the forward kernel saved.
Letters: S' is the state after the chunk, and b = exp(c_C - c) the share of each token that is left after it. `chunk`
explains R = β (V - exp(c) S K) and W = R (I + M)⁻¹. dX is the gradient of X:

    dW = dO Pᵀ + b (dS' K)        dR = dW (I + M)⁻ᵀ        dM = -Wᵀ dR        dP = Wᵀ dO

From there follow the gradients of the factors of M, P and R. c stands in differences alone: a pair of tokens adds to
one gradient and takes from the other.

Other letters are explained in the forward kernel.
"""

from collections.abc import Iterable
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from lm.ops.delta_rule.tpu import channels
from lm.ops.delta_rule.tpu.chunk import Chunk, Vectors, sum_rows
from lm.ops.delta_rule.tpu.plan import DeltaPlan
from lm.ops.tpu import SUBLANES, dot
from lm.ops.tpu.chunk_walk import ChunkReferences
from lm.ops.tpu.order import Turns, stagger


def differentiate(plan: DeltaPlan, refs: ChunkReferences) -> Iterable[Turns]:
    """Returns the work on each head, or pack of heads: the gradients of a chunk."""
    if plan.channels:
        packs = (channels.differentiate_heads(plan, refs, heads) for heads in plan.packs)
        return stagger(packs) if plan.staggered else packs
    return (_differentiate(plan, refs, n) for n in range(plan.heads))


def _differentiate(plan: DeltaPlan, refs: ChunkReferences, n: int) -> Turns:
    """Computes the gradients of key head n and its queries."""
    q, k, v, beta, *_ = refs.tokens
    dq, dk, dv, dbeta, dc, drest = refs.gradients
    do, dstate = refs.do, refs.dstate
    keys = Vectors(k[n], plan.key_length)
    chunk = Chunk(keys.x, v[n], cast(jax.Array, beta)[n], refs.tokens.sums(n), refs.states[n, 0])
    dtype = chunk.dtype
    queries = range(n * plan.groups, (n + 1) * plan.groups)
    vectors = [Vectors(q[m], plan.query_length) for m in queries]
    products = [(dot(chunk.k, each.x, (0, 0)), dot(chunk.state, each.x, (1, 0))) for each in vectors]
    dstate_operand = dstate[n].astype(dtype)
    folded = chunk.until * dot(dstate_operand, chunk.k, (1, 0))
    yield from chunk.solve(cast(jax.Ref, refs.inverses)[n, 0])
    # First dW, then dR, dM and dP.
    new = chunk.new.astype(dtype)
    dnew, weights = folded, []
    for m, (of_query, _) in zip(queries, products, strict=True):
        weights.append(chunk.weigh(of_query))
        dnew += dot(do[m], weights[-1].astype(dtype), (1, 1))
    yield
    dgiven = dot(dnew.astype(dtype), chunk.inverse, (1, 1))
    yield
    dgiven_operand = dgiven.astype(dtype)
    dsystem = -dot(new, dgiven_operand, (0, 0))
    dweights = [dot(new, do[m], (0, 0)) for m in queries]
    # Through R: the gradients of v and β, and of S and k through the difference.
    ddifference = chunk.beta * dgiven
    dv[n] = ddifference.astype(dtype)
    dread = (-chunk.since * ddifference).astype(dtype)
    yield
    # Through M: the gradients of β and of both sides of ⟨k_j, k_i⟩.
    of_system = dsystem * chunk.products
    cast(jax.Ref, dbeta)[n] = sum_rows(dgiven * chunk.difference) + sum_rows(of_system)
    dproducts = (dsystem * chunk.strictly * chunk.beta).astype(dtype)
    of_pairs = of_system * chunk.beta
    dc_1xC = -sum_rows(ddifference * chunk.read)
    dstates = chunk.whole * dstate[n] + dot(dread, chunk.k, (1, 1))
    dkeys = dot(chunk.state, dread, (0, 0)) + chunk.until * dot(dstate_operand, new, (0, 0))
    dkeys += dot(chunk.k, dproducts, (1, 1)) + dot(chunk.k, dproducts, (1, 0))
    yield
    # Through P and through the queries' reads.
    for m, each, dweight, weight, (_, read) in zip(queries, vectors, dweights, weights, products, strict=True):
        of_pairs += dweight * weight
        dc_1xC += sum_rows(do[m].astype(jnp.float32) * read) * chunk.since
        dproduct = (dweight * chunk.within).astype(dtype)
        dquery = chunk.since * dot(chunk.state, do[m], (0, 0)) + dot(chunk.k, dproduct, (1, 0))
        dq[m] = each.backwards(dquery).astype(dtype)
        dkeys += dot(each.x, dproduct, (1, 1))
        dstates += dot((chunk.since * do[m].astype(jnp.float32)).astype(dtype), each.x, (1, 1))
    dk[n] = keys.backwards(dkeys).astype(dtype)
    # c also scales the chunk's tokens and S after the chunk; pairs subtract the sum over queries.
    of_added = sum_rows(folded * chunk.new)
    of_state = jnp.sum(dstate[n] * chunk.state.astype(jnp.float32), keepdims=True) * chunk.whole
    ones = jnp.ones((SUBLANES, of_pairs.shape[0]), jnp.float32)
    dc_1xC += sum_rows(of_pairs) - dot(ones, of_pairs, (1, 1))[:1] - of_added
    is_last = lax.broadcasted_iota(jnp.int32, dc_1xC.shape, 1) == dc_1xC.shape[1] - 1
    dc[n] = dc_1xC + jnp.where(is_last, jnp.sum(of_added, keepdims=True) + of_state, 0.0)
    if drest is not None:
        drest[n] = jnp.zeros_like(dc_1xC)  # gradients go through c alone
    dstate[n] = dstates
