"""The delta rule in chunks, in plain XLA: time and memory linear in the length.

Inside a chunk, with G the running sums of log a and S the state before it, what the tokens add to the state at their
keys, U = [u_i], solves a unit triangular system (Yang et al. 2024, §3.2, the WY form; Gated DeltaNet, §3.3):

    (I + A) U = diag(β) (V - diag(exp(G)) K S)          A_ij = β_i ⟨k_i, k_j⟩ exp(G_i - G_j), j < i
    o_i = exp(G_i) Sᵀ q_i + Σ_{j ≤ i} exp(G_i - G_j) ⟨q_i, k_j⟩ u_j
    S'  = exp(G_C) S + Σ_j exp(G_C - G_j) k_j u_jᵀ

The systems of all chunks of a segment are solved side by side, for V and for K at once; only products with the state
walk from chunk to chunk. Kept for the backward pass are inputs, outputs and the state before each segment; a segment is
computed again when its gradient is.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lm.ops import decay as decays
from lm.ops import platform
from lm.ops.delta_rule.unit import lengths
from lm.ops.dots import dot
from lm.ops.residuals import saved

CHUNK = {'cpu': 64}
"""Tokens by platform, elsewhere 128: as many as a TPU has lanes. The system costs more with each, the walk less."""
SEGMENT = 2048
"""Tokens, about."""


class Tokens(NamedTuple):
    """In chunks: N in a segment, of C tokens; the queries of a key head are G groups."""

    q_BxKxNxGxCxE: jax.Array
    k_BxKxNxCxE: jax.Array
    v_BxKxNxCxD: jax.Array
    beta_BxKxNxC: jax.Array
    log_decay_BxKxNxC: jax.Array | None


def delta_rule(
    q_BxLxHxE: jax.Array,
    k_BxLxKxE: jax.Array,
    v_BxLxKxD: jax.Array,
    beta_BxLxK: jax.Array,
    log_decay_BxLxK: jax.Array | None,
    initial_state: jax.Array,
    query_length: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Arguments as in `lm.ops.delta_rule`; outputs, and the state after the last token."""
    q_BxLxHxE, k_BxLxKxE = lengths(q_BxLxHxE, k_BxLxKxE, query_length)
    arrays = (q_BxLxHxE, k_BxLxKxE, v_BxLxKxD, beta_BxLxK, log_decay_BxLxK, initial_state)
    if platform.uneven_batch(q_BxLxHxE.shape[0]):
        return _of_device(*arrays)
    # The partitioner would gather what a triangular system is solved for.
    return platform.per_device(_of_device, (True,) * len(arrays))(*arrays)


def unsupported(*args) -> None:
    """Everything is supported."""


def _of_device(q, k, v, beta, log_decay, state):
    batch, length, heads, _ = q.shape
    chunk = min(length, CHUNK.get(platform.target_platform(), 128))
    chunks = math.ceil(length / chunk)
    segments = math.ceil(chunks * chunk / SEGMENT)
    shape = segments, math.ceil(chunks / segments), chunk

    def cut(x):
        """[B, L, …] → [segments, B, N, C, …]; tokens of zeros at the end, which leave the state as it is."""
        x = jnp.pad(x, [(0, 0), (0, math.prod(shape) - length)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, *shape, *x.shape[2:]), 1, 0)

    q = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
    k, v, beta = (jnp.moveaxis(cut(x), 4, 2) for x in (k, v, beta))
    log_decay = None if log_decay is None else jnp.moveaxis(cut(log_decay.astype(jnp.float32)), 4, 2)
    tokens = Tokens(cut(q).transpose(0, 1, 4, 2, 5, 3, 6), k, v, beta.astype(jnp.float32), log_decay)
    state, o_SxBxKxNxGxCxD = _walk(tokens, state)
    o = o_SxBxKxNxGxCxD.transpose(1, 0, 3, 5, 2, 4, 6)
    return o.reshape(batch, -1, heads, v.shape[-1])[:, :length], state


@jax.custom_vjp
def _walk(tokens, state):
    """(the state after all segments, the outputs), of tokens with an axis over segments in front."""
    return lax.scan(lambda state, part: _segment(part, state), state, tokens)


def _walk_forward(tokens, state):
    def body(state, part):
        after, o = _segment(part, state)
        return after, (o, state)

    after, (o, before) = lax.scan(body, state, tokens)
    return (after, saved(o)), (tokens, saved(before))


def _walk_backward(residuals, cotangents):
    tokens, before = residuals
    dafter, do = cotangents

    def body(dafter, part):
        tokens, before, do = part
        dtokens, dbefore = jax.vjp(_segment, tokens, before)[1]((dafter, do))
        return dbefore, dtokens

    dbefore, dtokens = lax.scan(body, dafter, (tokens, before, do), reverse=True)
    return dtokens, dbefore


_walk.defvjp(_walk_forward, _walk_backward)


def _segment(tokens: Tokens, state_BxKxExD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(the state after its chunks, their outputs [B, K, N, G, C, D])."""
    q, k, v, beta, _ = tokens
    dtype, size = v.dtype, v.shape[-1]
    within_ij, since_start, until_end, whole = _factors(tokens)
    beta = beta[..., None]
    system = beta * dot('bknie,bknje->bknij', k, k) * jnp.tril(within_ij, -1)
    given = jnp.concatenate([beta * v, beta * since_start * k], axis=-1).astype(jnp.float32)
    solved = lax.linalg.triangular_solve(system, given, left_side=True, lower=True, unit_diagonal=True)
    weights = dot('bkngie,bknje->bkngij', q, k) * within_ij[:, :, :, None]
    q, k = q * since_start[:, :, :, None], k * until_end

    def step(state, chunk):
        q_BxKxGxCxE, k_BxKxCxE, u_BxKxCxD, w_BxKxCxE, weights_BxKxGxCxC, whole_BxK = chunk
        new_BxKxCxD = u_BxKxCxD - dot('bkce,bked->bkcd', w_BxKxCxE, state)
        o = dot('bkgce,bked->bkgcd', q_BxKxGxCxE, state) + dot('bkgij,bkjd->bkgid', weights_BxKxGxCxC, new_BxKxCxD)
        state = whole_BxK[..., None, None] * state + dot('bkce,bkcd->bked', k_BxKxCxE, new_BxKxCxD)
        return state, o.astype(dtype)

    chunks = (q, k, solved[..., :size], solved[..., size:], weights, whole)
    state, o_NxBxKxGxCxD = lax.scan(step, state_BxKxExD, jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), chunks))
    return state, jnp.moveaxis(o_NxBxKxGxCxD, 0, 2)


def _factors(tokens):
    """Products of the factors a, of the chunks: from token j to a later token i, [B, K, N, C, C], 0 elsewhere; from the
    start to each token and from each to the end, [B, K, N, C, 1]; from the start to the end, [B, K, N]."""
    *lead, length = tokens.beta_BxKxNxC.shape
    lower = jnp.tril(jnp.ones((length, length), jnp.float32))
    if tokens.log_decay_BxKxNxC is None:
        ones = jnp.ones((*lead, length, 1), jnp.float32)
        return jnp.broadcast_to(lower, (*lead, length, length)), ones, ones, ones[..., 0, 0]
    decay = decays.accumulate(tokens.log_decay_BxKxNxC.reshape(-1, length)[..., None])
    decay = jax.tree.map(lambda x: x.reshape(*lead, length + 1), decay)
    first, each, last = (decays.entries(decay, *of) for of in ((0, 1), (1,), (length,)))
    later, earlier = jax.tree.map(lambda x: x[..., :, None], each), jax.tree.map(lambda x: x[..., None, :], each)
    within = jnp.exp(jnp.where(lower > 0, decays.between(later, earlier), -jnp.inf))
    start, end = (jnp.exp(decays.between(*pair))[..., None] for pair in ((each, first), (last, each)))
    return within, start, end, jnp.exp(decays.between(last, first))[..., 0]
