"""Linear attention whose factors differ between the channels of a key, in chunks, in plain XLA.

    S_i = diag(a_i) S_{i-1} + k_i v_iᵀ        o_i = S_iᵀ q_i        (Yang et al. 2024, gated linear attention, eq. 3)

Inside a chunk the weights are direct products of decayed pairs (`lm.ops.channel_decay`). States walk from chunk to
chunk. The backward pass keeps inputs and the state before each segment, and computes each segment again. Only plain
features without a denominator have such factors: `totals` of the state stay as they are.

S segments, N chunks of C tokens per segment, G queries per key head.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from lm.ops import channel_decay, platform, sequence
from lm.ops.dots import dot
from lm.ops.linear_attention.types import LinearCall, LinearResult, State, decay_state

CHUNK = {'cpu': 64}
"""Tokens per chunk by platform, elsewhere 128."""
SEGMENT = 2048
"""Tokens per segment, about."""


Walk = Callable[[LinearCall, jax.Array], tuple[jax.Array, jax.Array]]
"""Takes a call and the state before its first token, [B, K, E, D] float32. Returns outputs [B, L, H, D], and the state
after the last token."""


def attend(call: LinearCall) -> LinearResult:
    """Computes the outputs of a call, and its state."""
    return attend_whole(walk, call)


def attend_whole(walk: Walk, call: LinearCall) -> LinearResult:
    """Computes the outputs of a call, and its state, by an implementation's `walk`."""
    state = call.initial_state
    if state is None:
        totals = (jnp.zeros(call.k_BxLxKxE.shape[:1] + call.k_BxLxKxE.shape[2:], jnp.float32),)
        state = State(_make_empty(call), totals)
    o_BxLxHxD, after_BxKxExD = walk(call, state.kv_BxKxRxD)
    return LinearResult(o_BxLxHxD, State(after_BxKxExD, state.totals) if call.with_state else None)


def attend_part(walk: Walk, call: LinearCall) -> LinearResult:
    """Computes the outputs of one part of a window that is split over devices (`lm.ops.sequence`)."""
    batch, length, heads, size = call.k_BxLxKxE.shape
    own_BxLxHxD, added_BxKxExD = walk(call, _make_empty(call))
    log_decay_BxLxKxE = call.all_log_decay_BxLxKxE
    before_BxKxExD = _carry(added_BxKxExD, log_decay_BxLxKxE.sum(1))
    since = jnp.exp(jnp.cumsum(log_decay_BxLxKxE, axis=1))
    q = call.q_BxLxHxE.reshape(batch, length, heads, -1, size) * since[:, :, :, None]
    read = dot('blkge,bked->blkgd', q, before_BxKxExD).reshape(own_BxLxHxD.shape)
    return LinearResult((own_BxLxHxD + read).astype(own_BxLxHxD.dtype), None)


def _make_empty(call: LinearCall) -> jax.Array:
    batch, _, heads, size = call.k_BxLxKxE.shape
    return jnp.zeros((batch, heads, size, call.v_BxLxKxD.shape[-1]), jnp.float32)


def _carry(added_BxKxExD: jax.Array, log_factor_BxKxE: jax.Array) -> jax.Array:
    """Returns the state after all parts before this one, which multiplies each row by a factor, and adds."""

    def compose(earlier, later):
        (before, earlier_log), (added, log) = earlier, later
        return decay_state(before, log) + added, earlier_log + log

    return sequence.carried((added_BxKxExD, log_factor_BxKxE), compose)[0]


def walk(call: LinearCall, state_BxKxExD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes the outputs of a call from the state before its first token, and the state after its last token."""
    arrays = call.q_BxLxHxE, call.k_BxLxKxE, call.v_BxLxKxD, call.all_log_decay_BxLxKxE, state_BxKxExD
    if platform.uneven_batch(call.q_BxLxHxE.shape[0]):
        return _walk_chunks(*arrays)
    return platform.per_device(_walk_chunks, (True,) * len(arrays))(*arrays)


def _walk_chunks(q_BxLxHxE, k_BxLxKxE, v_BxLxKxD, log_decay_BxLxKxE, state_BxKxExD) -> tuple[jax.Array, jax.Array]:
    batch, length, heads, size = q_BxLxHxE.shape
    chunk = min(channel_decay.round_up(length), CHUNK.get(platform.target_platform(), 128))
    chunks = math.ceil(length / chunk)
    segments = math.ceil(chunks * chunk / SEGMENT)
    shape = segments, math.ceil(chunks / segments), chunk

    def cut(x):
        """[B, L, K, …] → [S, B, K, …, N, C, last]; tokens of zeros at the end, which leave the state as it is."""
        x = jnp.pad(x, [(0, 0), (0, math.prod(shape) - length)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(batch, *shape, *x.shape[2:])
        return jnp.moveaxis(x, (1, 4), (0, 2))

    q = q_BxLxHxE.reshape(batch, length, k_BxLxKxE.shape[2], -1, size)
    tokens = {'k': k_BxLxKxE, 'v': v_BxLxKxD, 'log_decay': log_decay_BxLxKxE}
    tokens = {'q': jnp.moveaxis(cut(q), 5, 4)} | {name: cut(x) for name, x in tokens.items()}
    segment = jax.checkpoint(lambda state, part: _segment(state, **part), prevent_cse=False)
    state, o_SxBxKxNxGxCxD = lax.scan(segment, state_BxKxExD, tokens)
    o = o_SxBxKxNxGxCxD.transpose(1, 0, 3, 5, 2, 4, 6)
    return o.reshape(batch, -1, heads, v_BxLxKxD.shape[-1])[:, :length], state


def _segment(
    state_BxKxExD: jax.Array, *, q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes the state after the chunks of a segment, and their outputs [B, K, N, G, C, D].

    Tokens are [B, K, N, C, …], but queries [B, K, N, G, C, E].
    """
    pairs, since, until, whole = channel_decay.weigh(q, k, log_decay)
    weights = pairs + channel_decay.weigh_own(q, k)
    inside = dot('bkngij,bknjd->bkngid', weights.astype(v.dtype), v)

    def step(state, chunk):
        o = chunk['inside'] + dot('bkgce,bked->bkgcd', chunk['q_since'], state)
        state = chunk['whole'][..., None] * state + dot('bkce,bkcd->bked', chunk['k_until'], chunk['v'])
        return state, o.astype(v.dtype)

    sides = {'q_since': q * since[:, :, :, None], 'k_until': k * until, 'v': v, 'inside': inside, 'whole': whole}
    state, o_NxBxKxGxCxD = lax.scan(step, state_BxKxExD, jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), sides))
    return state, jnp.moveaxis(o_NxBxKxGxCxD, 0, 2)
