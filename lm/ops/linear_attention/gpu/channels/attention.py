"""Linear attention with a factor per key channel on Hopper GPUs: Mosaic GPU kernels, forward and backward.

One kernel walks over the states from chunk to chunk. Others compute all chunks at once, from the states before them.
The backward pass keeps inputs and these states.

The kernels compile for the H100 and H200 and run in JAX's interpreter. They have not run on a GPU, and so are chosen by
name only.
"""

import functools
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp

from lm.ops import platform
from lm.ops.custom_vjp import custom_vjp
from lm.ops.gpu import channel_pairs
from lm.ops.linear_attention.channels import attend_whole
from lm.ops.linear_attention.gpu.channels.plan import CHUNK, ChannelArrays, ChannelPlan, add_terms
from lm.ops.linear_attention.types import LinearCall, LinearResult
from lm.ops.residuals import save_residual

WIDEST = 256
"""Sizes of keys and of values; each 64 numbers of either have thread blocks of their own."""


def linear_attention(call: LinearCall) -> LinearResult:
    """Computes the call, which `unsupported` must not refuse."""
    return attend_whole(_attend_on_devices, call)


def unsupported(call: LinearCall) -> str | None:
    """Returns why the kernels cannot compute this call, or None."""
    q, k, v = call.q_BxLxHxE, call.k_BxLxKxE, call.v_BxLxKxD
    if reason := platform.without_mosaic_gpu():
        return reason
    if call.channel_log_decay_BxLxKxE is None:
        return 'takes one factor per key channel'
    if reason := platform.not_bfloat16(q, k, v):
        return reason
    if (widest := max(k.shape[-1], v.shape[-1])) > WIDEST:
        return f'takes heads of up to {WIDEST}, not {widest}'
    return platform.uneven_batch(q.shape[0])


def _attend_on_devices(call: LinearCall, state_BxKxExD: jax.Array) -> tuple[jax.Array, jax.Array]:
    return platform.per_device(_compute, (True, True))(call, state_BxKxExD)


def _compute(call: LinearCall, state_BxKxExD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes the outputs of a call from the state before its first token, and the state after its last token."""
    batch, length, heads, size = call.q_BxLxHxE.shape
    kv_heads, value_size = call.v_BxLxKxD.shape[2:]
    plan = ChannelPlan(
        heads=heads,
        key_heads=kv_heads,
        key_parts=-(-size // CHUNK),
        value_parts=-(-value_size // CHUNK),
        interpreted=platform.target_platform() != 'gpu',
    )
    sizes = plan.key_parts * CHUNK, plan.value_parts * CHUNK

    def arrange(x_BxLxKxF, size):
        """Zero tokens after the last one leave the state as it is; zero channels add nothing."""
        pad = ((0, 0), (0, -length % CHUNK), (0, 0), (0, size - x_BxLxKxF.shape[3]))
        return jnp.pad(x_BxLxKxF, pad).reshape(batch, -1, x_BxLxKxF.shape[2] * size)

    logs = jnp.maximum(call.all_log_decay_BxLxKxE, channel_pairs.LEAST)
    tokens = ChannelTokenArrays(
        arrange(call.q_BxLxHxE, sizes[0]),
        arrange(call.k_BxLxKxE, sizes[0]),
        arrange(call.v_BxLxKxD, sizes[1]),
        arrange(logs, sizes[0]),
    )
    state = jnp.pad(state_BxKxExD, [(0, 0)] * 2 + [(0, sizes[0] - size), (0, sizes[1] - value_size)])
    state = jnp.repeat(state, heads // kv_heads, axis=1)
    state = state.reshape(batch, heads, plan.key_parts, CHUNK, plan.value_parts, CHUNK).swapaxes(3, 4)
    o, state = cast(tuple[jax.Array, jax.Array], _attend(plan, tokens, state.reshape(-1, CHUNK, CHUNK)))
    o = o.reshape(batch, -1, heads, sizes[1])[:, :length, :, :value_size]
    state = state.reshape(batch, kv_heads, -1, plan.key_parts, plan.value_parts, CHUNK, CHUNK)[:, :, 0]
    state = state.swapaxes(3, 4).reshape(batch, kv_heads, *sizes)
    return o, state[:, :, :size, :value_size]


class ChannelTokenArrays(NamedTuple):
    """The tokens as in `ChannelArrays`, but with whole logs, float32."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    log: jax.Array

    def split(self) -> ChannelArrays[jax.Array]:
        """Returns the arrays that kernels take."""
        return ChannelArrays(self.q, self.k, self.v, channel_pairs.split_logs(self.log))


class ChunkSums(NamedTuple):
    """Sums of logs in each chunk, [B, T, C, K E] and for the whole chunk [B, T, K E]."""

    since: jax.Array
    until: jax.Array
    whole: jax.Array


def _sum_chunks(log_BxLxKE: jax.Array) -> ChunkSums:
    chunks = log_BxLxKE.reshape(log_BxLxKE.shape[0], -1, CHUNK, log_BxLxKE.shape[2])
    later = jnp.pad(chunks[:, :, 1:], ((0, 0), (0, 0), (0, 1), (0, 0)))
    since, until = jnp.cumsum(chunks, axis=2), jax.lax.cumsum(later, axis=2, reverse=True)
    return ChunkSums(since, until, since[:, :, -1])


def _fade(x_BxLxHE: jax.Array, logs_BxTxCxKE: jax.Array, groups: int, plan: ChannelPlan) -> jax.Array:
    """Multiplies the vectors of `groups` heads per key head by the factors."""
    batch, length, _ = x_BxLxHE.shape
    factors = jnp.exp(logs_BxTxCxKE).reshape(batch, length, plan.key_heads, 1, -1)
    x = x_BxLxHE.reshape(batch, length, plan.key_heads, groups, -1)
    return (x.astype(jnp.float32) * factors).astype(x.dtype).reshape(x_BxLxHE.shape)


def _repeat_whole(plan: ChannelPlan, whole_BxTxKE: jax.Array) -> jax.Array:
    """Returns the factors of whole chunks for each part of each query head, [N, T C]."""
    batch, chunks, _ = whole_BxTxKE.shape
    factors = jnp.exp(whole_BxTxKE).reshape(batch, chunks, plan.key_heads, plan.key_parts, CHUNK)
    factors = jnp.repeat(factors, plan.heads // plan.key_heads, axis=2).transpose(0, 2, 3, 1, 4)
    return jnp.repeat(factors[:, :, :, None], plan.value_parts, axis=3).reshape(batch * plan.parts, -1)


@custom_vjp(0)
def _attend(plan: ChannelPlan, tokens: ChannelTokenArrays, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns outputs [B, L, H D], and the states after all chunks."""
    return _forward(plan, tokens, state)[:2]


# It is compiled as one function, which all layers share: lowering the kernels takes seconds.
@functools.partial(jax.jit, static_argnums=0)
def _forward(plan: ChannelPlan, tokens: ChannelTokenArrays, state: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes outputs, the states after all chunks, and the states before each chunk."""
    # Mosaic GPU takes half a second to import: only runs that use it wait for it.
    from lm.ops.linear_attention.gpu.channels.forward import compute
    from lm.ops.linear_attention.gpu.channels.states import WalkedTokens, walk_states

    sums = _sum_chunks(tokens.log)
    walked = WalkedTokens(_fade(tokens.k, sums.until, 1, plan), tokens.v, _repeat_whole(plan, sums.whole))
    before, after = walk_states(walked, state, plan.slice_keys, plan.slice_values)
    o = compute(plan, tokens.split(), before)
    return add_terms(o).astype(tokens.v.dtype), after, before


def _attend_forward(plan: ChannelPlan, tokens: ChannelTokenArrays, state: jax.Array):
    o, after, before = _forward(plan, tokens, state)
    return (save_residual(o), after), (tokens, save_residual(before))


@functools.partial(jax.jit, static_argnums=0)
def _attend_backward(
    plan: ChannelPlan, residuals: tuple[ChannelTokenArrays, jax.Array], cotangents: tuple[jax.Array, jax.Array]
) -> tuple[ChannelTokenArrays, jax.Array]:
    from lm.ops.linear_attention.gpu.channels.backward import GradientSources, differentiate
    from lm.ops.linear_attention.gpu.channels.states import WalkedTokens, walk_states

    (tokens, before), (do, dstate) = residuals, cotangents
    sums, groups = _sum_chunks(tokens.log), plan.heads // plan.key_heads
    walked = WalkedTokens(_fade(tokens.q, sums.since, groups, plan), do, _repeat_whole(plan, sums.whole))
    dafter, dfirst = walk_states(walked, dstate, plan.slice_queries, plan.slice_outputs, backwards=True)
    found = differentiate(plan, GradientSources(tokens.split(), do, before, dafter))

    def add_groups(terms: jax.Array) -> jax.Array:
        x = add_terms(terms)
        if groups == 1:
            return x
        x = x.reshape(*x.shape[:2], plan.key_heads, groups, -1).astype(jnp.float32)
        return x.sum(axis=3).reshape(*x.shape[:2], -1)

    dk, dv, dlog = (add_groups(x) for x in (found.dk, found.dv, found.dlog))
    dtype = tokens.q.dtype
    dtokens = ChannelTokenArrays(add_terms(found.dq).astype(dtype), dk.astype(dtype), dv.astype(dtype), dlog)
    return dtokens, dfirst


_attend.defvjp(_attend_forward, _attend_backward)
