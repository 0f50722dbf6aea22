"""Linear attention with a factor per key channel on Hopper GPUs: Mosaic GPU kernels, forward and backward.

One kernel walks over the states from chunk to chunk. Others compute all chunks at once, from the states before them.
The backward pass keeps inputs and these states.

The kernels compile for the H100 and H200 and run in JAX's interpreter. They have not run on a GPU, and so are chosen by
name only.
"""

import functools
from typing import cast

import jax
import jax.numpy as jnp

from lm.ops import platform
from lm.ops.custom_vjp import custom_vjp
from lm.ops.gpu import channel_pairs
from lm.ops.linear_attention.channels import attend_whole
from lm.ops.linear_attention.gpu.channels.plan import CHUNK, ChannelArrays, ChannelPlan, add_terms, split_logs
from lm.ops.linear_attention.types import LinearCall, LinearResult
from lm.ops.residuals import save_residual

Tokens = ChannelArrays[jax.Array, jax.Array]
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
    )
    sizes = plan.key_parts * CHUNK, plan.value_parts * CHUNK

    def arrange(x_BxLxKxF, size):
        """Zero tokens after the last one leave the state as it is; zero channels add nothing."""
        pad = ((0, 0), (0, -length % CHUNK), (0, 0), (0, size - x_BxLxKxF.shape[3]))
        return jnp.pad(x_BxLxKxF, pad).reshape(batch, -1, x_BxLxKxF.shape[2] * size)

    logs = jnp.maximum(call.all_log_decay_BxLxKxE, channel_pairs.LEAST)
    tokens = ChannelArrays(
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


def _sum_chunks(log_BxLxKE: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes sums of logs in each chunk.

    Returns:
        (since its start, until its end, of all of it): twice [B, T, C, K E], and [B, T, K E].
    """
    chunks = log_BxLxKE.reshape(log_BxLxKE.shape[0], -1, CHUNK, log_BxLxKE.shape[2])
    later = jnp.pad(chunks[:, :, 1:], ((0, 0), (0, 0), (0, 1), (0, 0)))
    since, until = jnp.cumsum(chunks, axis=2), jax.lax.cumsum(later, axis=2, reverse=True)
    return since, until, since[:, :, -1]


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
def _attend(plan: ChannelPlan, tokens: Tokens, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns outputs [B, L, H D], and the states after all chunks."""
    return _forward(plan, tokens, state)[:2]


# It is compiled as one function, which all layers share: lowering the kernels takes seconds.
@functools.partial(jax.jit, static_argnums=0)
def _forward(plan: ChannelPlan, tokens: Tokens, state: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes outputs, the states after all chunks, and the states before each chunk."""
    # Mosaic GPU takes half a second to import: only runs that use it wait for it.
    from lm.ops.linear_attention.gpu.channels.forward import compute
    from lm.ops.linear_attention.gpu.channels.states import walk_states

    _, until, whole = _sum_chunks(tokens.logs)
    k, whole = _fade(tokens.k, until, 1, plan), _repeat_whole(plan, whole)
    before, after = walk_states(state, b=k, c=tokens.v, w=whole, slice_b=plan.slice_keys, slice_c=plan.slice_values)
    o = compute(plan, split_logs(tokens), before)
    return add_terms(o).astype(tokens.v.dtype), after, before


def _attend_forward(plan: ChannelPlan, tokens: Tokens, state: jax.Array):
    o, after, before = _forward(plan, tokens, state)
    return (save_residual(o), after), (tokens, save_residual(before))


@functools.partial(jax.jit, static_argnums=0)
def _attend_backward(
    plan: ChannelPlan, residuals: tuple[Tokens, jax.Array], cotangents: tuple[jax.Array, jax.Array]
) -> tuple[Tokens, jax.Array]:
    from lm.ops.linear_attention.gpu.channels.backward import differentiate
    from lm.ops.linear_attention.gpu.channels.states import walk_states

    (tokens, before), (do, dstate) = residuals, cotangents
    (since, _, whole), groups = _sum_chunks(tokens.logs), plan.heads // plan.key_heads
    q, whole = _fade(tokens.q, since, groups, plan), _repeat_whole(plan, whole)
    slices = {'slice_b': plan.slice_queries, 'slice_c': plan.slice_outputs}
    dafter, dfirst = walk_states(dstate, b=q, c=do, w=whole, **slices, backwards=True)
    found = differentiate(plan, split_logs(tokens), do=do, before=before, dafter=dafter)

    def add_groups(terms: jax.Array) -> jax.Array:
        x = add_terms(terms)
        if groups == 1:
            return x
        x = x.reshape(*x.shape[:2], plan.key_heads, groups, -1).astype(jnp.float32)
        return x.sum(axis=3).reshape(*x.shape[:2], -1)

    dk, dv, dlog = (add_groups(x) for x in (found.k, found.v, found.logs))
    dtype = tokens.q.dtype
    dtokens = ChannelArrays(add_terms(found.q).astype(dtype), dk.astype(dtype), dv.astype(dtype), dlog)
    return dtokens, dfirst


_attend.defvjp(_attend_forward, _attend_backward)
