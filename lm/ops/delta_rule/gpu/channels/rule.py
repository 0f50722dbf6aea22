"""The delta rule with a factor per key channel on Hopper GPUs: Mosaic GPU kernels, forward and backward.

Formulas as in `lm.ops.delta_rule.gpu.rule`, with factors exp(G) per channel. Kernels solve the systems of all chunks at
once, and one walks from chunk to chunk. What the tokens of a chunk add to the state are the values of linear attention
with a factor per channel: its kernels compute outputs and gradients. The backward pass keeps the arguments and the
state before each chunk.

The kernels compile for the H100 and H200 and run in JAX's interpreter. They have not run on a GPU, and so are chosen by
name only.

N are the key heads of all sequences. G queries share a key. L tokens are in T chunks of C. E is the size of a key, and
D the size of a value; both are in parts of 64 numbers.
"""

import functools
from typing import cast

import jax
import jax.numpy as jnp

from lm.ops import platform
from lm.ops.custom_vjp import custom_vjp
from lm.ops.delta_rule.gpu.rule import fill_parts, refuse
from lm.ops.delta_rule.gpu.sides import WalkSides
from lm.ops.delta_rule.types import DeltaCall, DeltaResult
from lm.ops.delta_rule.unit import scale_vectors
from lm.ops.dots import dot
from lm.ops.gpu import channel_pairs
from lm.ops.linear_attention.gpu.channels.plan import (
    CHUNK,
    ChannelArrays,
    ChannelPlan,
    KernelTokens,
    add_terms,
    split_logs,
)
from lm.ops.residuals import save_residual

Tokens = ChannelArrays[jax.Array, jax.Array]


def delta_rule(call: DeltaCall) -> DeltaResult:
    """Computes the call, which `unsupported` must not refuse."""
    return platform.per_device(_compute, (True,))(scale_vectors(call.fill_state()))


def unsupported(call: DeltaCall) -> str | None:
    """Returns why the kernels cannot compute this call, or None."""
    if call.channel_log_decay_BxLxKxE is None and not platform.without_mosaic_gpu():
        return 'takes one factor per key channel'
    return refuse(call)


def _compute(call: DeltaCall) -> DeltaResult:
    batch, length, heads, key_size = call.q_BxLxHxE.shape
    kv_heads, value_size = call.v_BxLxKxD.shape[2:]
    groups, wide_key, wide_value = heads // kv_heads, fill_parts(key_size), fill_parts(value_size)
    plan = ChannelPlan(
        heads=groups,
        key_heads=1,
        key_parts=wide_key // CHUNK,
        value_parts=wide_value // CHUNK,
    )

    def arrange(x):
        """[B, L, heads, …] → [B · K, L, G …]; zero tokens leave the state as it is, and zero channels add nothing."""
        last = [(0, fill_parts(size) - size) for size in x.shape[3:]]
        x = jnp.pad(x, [(0, 0), (0, -length % CHUNK), (0, 0), *last])
        x = x.reshape(*x.shape[:2], kv_heads, -1).swapaxes(1, 2)
        return x.reshape(batch * kv_heads, x.shape[2], -1)

    logs = jnp.maximum(cast(jax.Array, call.all_log_decay_BxLxKxE), channel_pairs.LEAST)
    beta = arrange(call.beta_BxLxK.astype(jnp.float32))[..., 0]
    q, k, v = map(arrange, (call.q_BxLxHxE, call.k_BxLxKxE, call.v_BxLxKxD))
    tokens = ChannelArrays(q, k, v, arrange(logs))
    missing = ((0, 0), (0, 0), (0, wide_key - key_size), (0, wide_value - value_size))
    state = jnp.pad(call.first_state_BxKxExD, missing).reshape(-1, wide_key, wide_value)
    o, state = cast(tuple[jax.Array, jax.Array], _rule(plan, tokens, beta, state))
    o = o.reshape(batch, kv_heads, -1, groups, wide_value).swapaxes(1, 2)
    o = o.reshape(batch, -1, heads, wide_value)[:, :length, :, :value_size]
    return DeltaResult(o, state.reshape(batch, kv_heads, wide_key, wide_value)[:, :, :key_size, :value_size])


def _cut(x_NxLxE: jax.Array) -> jax.Array:
    """Returns [N, T, C, E]."""
    return x_NxLxE.reshape(len(x_NxLxE), -1, CHUNK, x_NxLxE.shape[-1])


def _solve(plan: ChannelPlan, tokens: Tokens, beta_NxL: jax.Array) -> WalkSides:
    """Computes the arrays of the walk, which depend on no state."""
    # Mosaic GPU takes half a second to import: only runs that use it wait for it.
    from lm.ops.delta_rule.gpu.channels.systems import solve

    new, seen = solve(split_logs(tokens), beta_NxL, tokens.v)
    log_NxTxCxE = _cut(tokens.logs)
    later = jnp.pad(log_NxTxCxE[:, :, 1:], ((0, 0), (0, 0), (0, 1), (0, 0)))
    until = jnp.exp(jax.lax.cumsum(later, axis=2, reverse=True))
    faded = (_cut(tokens.k).astype(jnp.float32) * until).astype(new.dtype)
    return WalkSides(_cut(seen), faded, _cut(new), jnp.exp(log_NxTxCxE.sum(axis=2)))


def _make_right_sides(k, beta, log, v) -> tuple[jax.Array, jax.Array]:
    """Makes diag(β) V and -diag(β) (K exp(G)), float32."""
    since = jnp.exp(jnp.cumsum(_cut(log), axis=2)).reshape(log.shape)
    k, v = k.astype(jnp.float32), v.astype(jnp.float32)
    return v * beta[..., None], k * since * -beta[..., None]


def _cut_states(plan: ChannelPlan, states_NxTxExD: jax.Array, only_first: bool = False) -> jax.Array:
    """Returns the states of each part of each query head, [N parts, T C, 64].

    With `only_first`, all but a key's first query have zeros.
    """
    n, chunks = states_NxTxExD.shape[:2]
    states = states_NxTxExD.reshape(n, chunks, plan.key_parts, CHUNK, plan.value_parts, CHUNK)
    states = states.transpose(0, 2, 4, 1, 3, 5).reshape(n, 1, -1, chunks * CHUNK, CHUNK)
    more = jnp.zeros_like(states) if only_first else states
    return jnp.concatenate([states, *[more] * (plan.heads - 1)], axis=1).reshape(-1, *states.shape[3:])


def _add_state_gradients(plan: ChannelPlan, terms: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Adds the terms [N parts, T C, 64] of queries that share a key, and joins parts; `shape` is [N, T, E, D]."""
    terms = terms.reshape(shape[0], plan.heads, plan.key_parts, plan.value_parts, shape[1], CHUNK, CHUNK)
    joined = terms[:, 0] if plan.heads == 1 else terms.astype(jnp.float32).sum(axis=1).astype(terms.dtype)
    return joined.transpose(0, 3, 1, 4, 2, 5).reshape(shape)


@custom_vjp(0)
def _rule(plan: ChannelPlan, tokens: Tokens, beta: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns outputs [N, L, G D], and the state after all chunks. Tokens are [N, L, …], and β is float32 [N, L]."""
    return _forward(plan, tokens, beta, state)[:2]


# It is compiled as one function, which all layers share.
@functools.partial(jax.jit, static_argnums=0)
def _forward(
    plan: ChannelPlan, tokens: Tokens, beta: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes outputs, the state after all chunks, and the states before each chunk."""
    from lm.ops.delta_rule.gpu.states import walk_states
    from lm.ops.linear_attention.gpu.channels.forward import compute

    before, new, after = walk_states(_solve(plan, tokens, beta), state)
    o = add_terms(compute(plan, _replace_values(tokens, new), _cut_states(plan, before)))
    return o.astype(tokens.v.dtype), after, before


def _replace_values(tokens: Tokens, new_NxTxCxD: jax.Array) -> KernelTokens[jax.Array]:
    """Returns the tokens of linear attention, whose values are what the tokens add."""
    return split_logs(tokens._replace(v=new_NxTxCxD.reshape(tokens.v.shape)))


def _rule_forward(plan: ChannelPlan, tokens: Tokens, beta: jax.Array, state: jax.Array):
    o, after, before = _forward(plan, tokens, beta, state)
    return (save_residual(o), after), (tokens, beta, save_residual(before))


@functools.partial(jax.jit, static_argnums=0)
def _rule_backward(
    plan: ChannelPlan, residuals: tuple[Tokens, jax.Array, jax.Array], cotangents: tuple[jax.Array, jax.Array]
) -> tuple[Tokens, jax.Array, jax.Array]:
    from lm.ops.delta_rule.gpu.channels.reads import differentiate_reads
    from lm.ops.delta_rule.gpu.states import walk_states
    from lm.ops.linear_attention.gpu.channels.backward import differentiate

    (tokens, beta, before), (do, dafter) = residuals, cotangents
    sides, dtype = _solve(plan, tokens, beta), do.dtype
    new = (sides.c_NxTxCxD + dot('ntce,nted->ntcd', sides.a_NxTxCxE, before)).astype(dtype)
    arrays = _replace_values(tokens, new)
    dnew, dstate = differentiate_reads(plan, q=arrays.q, k=arrays.k, logs=arrays.logs, do=do)
    dnew = _cut(_add_groups(plan, dnew).astype(dtype))
    dstate = _add_state_gradients(plan, dstate, before.shape)
    turned = WalkSides(sides.b_NxTxCxE, sides.a_NxTxCxE, dnew, sides.w, dstate)
    dlater, dnew, dfirst = walk_states(turned, dafter, backwards=True)
    # The state after a chunk belongs to a key head, so one of its queries alone gives gradients through it.
    dlater = _cut_states(plan, dlater, only_first=True)
    found = differentiate(plan, arrays, do=do, before=_cut_states(plan, before), dafter=dlater)
    dseen = dot('ntcd,nted->ntce', dnew, before).astype(dtype)
    of_systems, dbeta = _differentiate_systems(plan, tokens, beta, sides, dnew.reshape(tokens.v.shape), dseen)
    dk = _add_groups(plan, found.k).astype(jnp.float32) + of_systems.k
    dlog = _add_groups(plan, found.logs) + of_systems.logs
    dtokens = ChannelArrays(add_terms(found.q).astype(dtype), dk.astype(dtype), of_systems.v.astype(dtype), dlog)
    return dtokens, dbeta, dfirst


def _add_groups(plan: ChannelPlan, terms: jax.Array) -> jax.Array:
    """Adds terms of parts, [terms, N, L, G E], and of queries that share a key."""
    x = add_terms(terms)
    if plan.heads == 1:
        return x
    return x.reshape(*x.shape[:2], plan.heads, -1).astype(jnp.float32).sum(axis=2).astype(x.dtype)


def _differentiate_systems(
    plan: ChannelPlan, tokens: Tokens, beta: jax.Array, sides: WalkSides, dnew_NxLxD: jax.Array, dseen: jax.Array
) -> tuple[ChannelArrays[jax.Array, jax.Array], jax.Array]:
    """Computes the gradients that the systems give to tokens and to β, float32; queries have none."""
    from lm.ops.delta_rule.gpu.channels.systems import differentiate_systems, solve_transposed

    system, dtype = split_logs(tokens), tokens.k.dtype
    k, wide_beta = tokens.k.astype(jnp.float32), beta[..., None]
    # X (…) = U: the gradient of (…) is Xᵀ dU, and the gradient of A is -Xᵀ dU Uᵀ.
    dvalues, dkeys = solve_transposed(system, beta, dnew_NxLxD, dseen.reshape(k.shape))
    dsystem = dot('ntid,ntjd->ntij', _cut(dvalues), sides.c_NxTxCxD)
    dsystem += dot('ntie,ntje->ntij', _cut(dkeys), sides.a_NxTxCxE)
    dsystem = (-dsystem).astype(dtype).reshape(*k.shape[:2], CHUNK)
    scaled = (k * wide_beta).astype(dtype)
    dscaled, more_dk, more_dlog = differentiate_systems(system, scaled, dsystem)
    pull = jax.vjp(_make_right_sides, tokens.k, beta, tokens.logs, tokens.v)[1]
    more = pull((dvalues.astype(jnp.float32), dkeys.astype(jnp.float32)))
    dk, dbeta, dlog, dv = (x.astype(jnp.float32) for x in more)
    dscaled = dscaled.astype(jnp.float32)
    dk += dscaled * wide_beta + more_dk.astype(jnp.float32)
    return ChannelArrays(jnp.float32(0.0), dk, dv, dlog + more_dlog), dbeta + (dscaled * k).sum(axis=-1)


_rule.defvjp(_rule_forward, _rule_backward)
