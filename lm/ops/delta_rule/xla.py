"""The delta rule in chunks, in plain XLA: time and memory linear in the length.

The tokens of a chunk add U = [u_i] to the state at their keys. U solves a unit triangular system (Yang et al. 2024,
§3.2, the WY form; Gated DeltaNet, §3.3). With G the running sums of log a, and S the state before the chunk:

     (I + A) U = diag(β) (V - diag(exp(G)) K S)         A_ij = β_i ⟨k_i, k_j⟩ exp(G_i - G_j), j < i
     o_i = exp(G_i) Sᵀ q_i + Σ_{j ≤ i} exp(G_i - G_j) ⟨q_i, k_j⟩ u_j
     S'  = exp(G_C) S + Σ_j exp(G_C - G_j) k_j u_jᵀ

With a factor per key channel, G_i is a vector: exp(G_i) multiplies the rows of S, and the products of pairs are the
sums of `lm.ops.channel_decay`.

The systems of all chunks of a segment are solved side by side, for V and for K at once; only products with the state
walk from chunk to chunk. The backward pass keeps inputs, outputs and the state before each segment, and computes each
segment again.
"""

import math
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from lm.ops import channel_decay, platform
from lm.ops import decay as decays
from lm.ops.delta_rule import system
from lm.ops.delta_rule.types import DeltaCall, DeltaResult
from lm.ops.delta_rule.unit import scale_vectors
from lm.ops.dots import dot
from lm.ops.residuals import save_residual

CHUNK = {'cpu': 64}
"""Tokens per chunk by platform, elsewhere 128, the lanes of a TPU. Larger chunks make the system dearer, the walk
cheaper."""
SEGMENT = 2048
"""Tokens per segment, about."""


class Tokens(NamedTuple):
    """The tokens of a call in chunks: N per segment, of C tokens; the queries of a key head are G groups.

    The logs of the factors are one per token, one per channel, or neither.
    """

    q_BxKxNxGxCxE: jax.Array
    k_BxKxNxCxE: jax.Array
    v_BxKxNxCxD: jax.Array
    beta_BxKxNxC: jax.Array
    log_decay_BxKxNxC: jax.Array | None
    log_decay_BxKxNxCxE: jax.Array | None


def delta_rule(call: DeltaCall) -> DeltaResult:
    """Computes the call."""
    call = scale_vectors(call.fill_state())
    if platform.uneven_batch(call.q_BxLxHxE.shape[0]):
        return _compute(call)
    # No device needs rows or heads of another; the partitioner does not always see that.
    return platform.per_device(_compute, (True,))(call)


def _compute(call: DeltaCall) -> DeltaResult:
    batch, length, heads, key_size = call.q_BxLxHxE.shape
    by_channel = call.all_log_decay_BxLxKxE
    chunk = length if by_channel is None else channel_decay.round_up(length)
    chunk = min(chunk, CHUNK.get(platform.target_platform(), 128))
    chunks = math.ceil(length / chunk)
    segments = math.ceil(chunks * chunk / SEGMENT)
    shape = segments, math.ceil(chunks / segments), chunk

    def cut(x):
        """[B, L, …] → [segments, B, N, C, …]; tokens of zeros at the end, which leave the state as it is."""
        x = jnp.pad(x, [(0, 0), (0, math.prod(shape) - length)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, *shape, *x.shape[2:]), 1, 0)

    q = call.q_BxLxHxE.reshape(batch, length, -1, call.groups, key_size)
    k, v, beta = (jnp.moveaxis(cut(x), 4, 2) for x in (call.k_BxLxKxE, call.v_BxLxKxD, call.beta_BxLxK))
    log_decay = call.log_decay_BxLxK if by_channel is None else None
    if log_decay is not None:
        log_decay = jnp.moveaxis(cut(log_decay.astype(jnp.float32)), 4, 2)
    if by_channel is not None:
        by_channel = jnp.moveaxis(cut(by_channel), 4, 2)
    tokens = Tokens(cut(q).transpose(0, 1, 4, 2, 5, 3, 6), k, v, beta.astype(jnp.float32), log_decay, by_channel)
    state, o_SxBxKxNxGxCxD = _walk(tokens, call.first_state_BxKxExD)
    o = o_SxBxKxNxGxCxD.transpose(1, 0, 3, 5, 2, 4, 6)
    return DeltaResult(o.reshape(batch, -1, heads, v.shape[-1])[:, :length], state)


@jax.custom_vjp
def _walk(tokens, state):
    """Returns (the state after all segments, the outputs) for tokens with an axis over segments in front."""
    return lax.scan(lambda state, part: _segment(part, state), state, tokens)


def _walk_forward(tokens, state):
    def body(state, part):
        after, o = _segment(part, state)
        return after, (o, state)

    after, (o, before) = lax.scan(body, state, tokens)
    return (after, save_residual(o)), (tokens, save_residual(before))


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
    """Returns (the state after its chunks, their outputs [B, K, N, G, C, D])."""
    q, k, v, beta, *_ = tokens
    dtype, size = v.dtype, v.shape[-1]
    weigh = _weigh_by_head if tokens.log_decay_BxKxNxCxE is None else _weigh_by_channel
    system_CxC, weights, since, until, whole = weigh(tokens)
    beta = beta[..., None]
    given = jnp.concatenate([beta * v, beta * since * k], axis=-1).astype(jnp.float32)
    solved = system.solve(system_CxC, given)
    q, k = q * since[:, :, :, None], k * until

    def step(state, chunk):
        """A token's addition is u if the state were 0; w times the state is subtracted from it."""
        new_BxKxCxD = chunk['u'] - dot('bkce,bked->bkcd', chunk['w'], state)
        o = dot('bkgce,bked->bkgcd', chunk['q_since'], state)
        o += dot('bkgij,bkjd->bkgid', chunk['weights'], new_BxKxCxD)
        whole = jnp.expand_dims(chunk['whole'], range(chunk['whole'].ndim, 4))
        state = whole * state + dot('bkce,bkcd->bked', chunk['k_until'], new_BxKxCxD)
        return state, o.astype(dtype)

    chunks = {'q_since': q, 'k_until': k, 'u': solved[..., :size], 'w': solved[..., size:]}
    chunks |= {'weights': weights, 'whole': whole}
    state, o_NxBxKxGxCxD = lax.scan(step, state_BxKxExD, jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), chunks))
    return state, jnp.moveaxis(o_NxBxKxGxCxD, 0, 2)


def _weigh_by_channel(tokens: Tokens) -> tuple[jax.Array, ...]:
    """Computes the weights of a chunk's pairs, and the products of factors that its operands take.

    Returns:
        (A, strictly lower triangular, the weights of the tokens' additions for the queries, [B, K, N, G, C, C], and
        factors: from the start to each token, from each token to the end, [B, K, N, C, E], from the start to the end).
    """
    q, k, _, beta, _, log_decay = tokens
    both = jnp.concatenate([k[:, :, :, None], q], axis=3)
    pairs, since, until, whole = channel_decay.weigh(both, k, cast(jax.Array, log_decay))
    weights = pairs[:, :, :, 1:] + channel_decay.weigh_own(q, k)
    return beta[..., None] * pairs[:, :, :, 0], weights, since, until, whole


def _weigh_by_head(tokens: Tokens) -> tuple[jax.Array, ...]:
    """Returns the same for channels that share a factor: E is 1, and the factors of whole chunks have no such axis."""
    q, k = tokens.q_BxKxNxGxCxE, tokens.k_BxKxNxCxE
    *lead, length = tokens.beta_BxKxNxC.shape
    lower = jnp.tril(jnp.ones((length, length), jnp.float32))
    if tokens.log_decay_BxKxNxC is None:
        start = end = jnp.ones((*lead, length, 1), jnp.float32)
        within, whole = jnp.broadcast_to(lower, (*lead, length, length)), start[..., 0, 0]
    else:
        decay = decays.accumulate(tokens.log_decay_BxKxNxC.reshape(-1, length)[..., None])
        decay = jax.tree.map(lambda x: x.reshape(*lead, length + 1), decay)
        first, each, last = (decays.entries(decay, *of) for of in ((0, 1), (1,), (length,)))
        later, earlier = jax.tree.map(lambda x: x[..., :, None], each), jax.tree.map(lambda x: x[..., None, :], each)
        within = jnp.exp(jnp.where(lower > 0, decays.between(later, earlier), -jnp.inf))
        start, end = (jnp.exp(decays.between(*pair))[..., None] for pair in ((each, first), (last, each)))
        whole = jnp.exp(decays.between(last, first))[..., 0]
    system = tokens.beta_BxKxNxC[..., None] * dot('bknie,bknje->bknij', k, k) * jnp.tril(within, -1)
    weights = dot('bkngie,bknje->bkngij', q, k) * within[:, :, :, None]
    return system, weights, start, end, whole
