"""The delta rule on Hopper GPUs: kernels solve the systems of all chunks at once, and one walks from chunk to chunk.

Formulas as in `lm.ops.delta_rule.xla`, with factors from t, the sums of the logs of a chunk's tokens. Whatever depends
on no state is computed first. The kernel computes n_t = U_t - W_t S_t and S_{t+1}, and also their gradients, which have
the same form. The backward pass keeps the arguments and the state before each chunk.

N key heads of all sequences, G queries of each, T chunks of C tokens, E key size, D value size. Kernels take 64 numbers
of a key or of a value at a time, a part.
"""

from typing import cast

import jax
import jax.numpy as jnp

from lm.ops import decay as decays
from lm.ops import platform
from lm.ops.delta_rule.gpu.sides import WalkSides
from lm.ops.delta_rule.types import DeltaCall, DeltaResult
from lm.ops.delta_rule.unit import scale_vectors
from lm.ops.dots import dot
from lm.ops.residuals import save_residual

CHUNK = 64
WIDEST_KEY = 128
"""A thread block that walks over the states has all parts of a key in shared memory."""
WIDEST_VALUE = 256
"""A thread block that solves the systems of a chunk has all parts of a value in shared memory."""


def delta_rule(call: DeltaCall) -> DeltaResult:
    """Computes the call, which `unsupported` must not refuse."""
    return platform.per_device(_compute, (True,))(scale_vectors(call.fill_state()))


def unsupported(call: DeltaCall) -> str | None:
    """Returns why the kernels cannot compute this call, or None."""
    if call.channel_log_decay_BxLxKxE is not None and not platform.without_mosaic_gpu():
        return 'takes one factor per token and head, not one per key channel'
    return refuse(call)


def refuse(call: DeltaCall) -> str | None:
    """Returns why kernels cannot compute this call, be its factors of heads or of channels, or None."""
    q, k, v = call.q_BxLxHxE, call.k_BxLxKxE, call.v_BxLxKxD
    if reason := platform.without_mosaic_gpu() or platform.not_bfloat16(q, k, v):
        return reason
    if k.shape[-1] > WIDEST_KEY or v.shape[-1] > WIDEST_VALUE:
        most = f'keys of up to {WIDEST_KEY} and values of up to {WIDEST_VALUE}'
        return f'takes {most}, not {k.shape[-1]} and {v.shape[-1]}'
    return platform.uneven_batch(q.shape[0])


def name_form(call: DeltaCall) -> str:
    """Returns ' (wide heads)' for keys or values of several parts, which take other kernels, else ''."""
    return ' (wide heads)' if max(call.k_BxLxKxE.shape[-1], call.v_BxLxKxD.shape[-1]) > CHUNK else ''


def fill_parts(size: int) -> int:
    """Returns the size of a key or a value whose last part is filled with zeros."""
    return -(-size // CHUNK) * CHUNK


def _compute(call: DeltaCall) -> DeltaResult:
    batch, length, heads, key_size = call.q_BxLxHxE.shape
    kv_heads, value_size = call.v_BxLxKxD.shape[2:]
    chunks = -(-length // CHUNK)

    def arrange(x):
        """[B, L, heads, …] → [B · K, G, T, C, …]; tokens of zeros at the end, which leave the state as it is."""
        pad = [(0, 0), (0, chunks * CHUNK - length), (0, 0)] + [(0, fill_parts(size) - size) for size in x.shape[3:]]
        x = jnp.moveaxis(jnp.pad(x, pad), 1, 2)
        return x.reshape(batch * kv_heads, x.shape[1] // kv_heads, chunks, CHUNK, *x.shape[3:])

    beta, log_decay = call.beta_BxLxK.astype(jnp.float32), call.log_decay_BxLxK
    k, v, beta = (arrange(x)[:, 0] for x in (call.k_BxLxKxE, call.v_BxLxKxD, beta))
    log_decay = None if log_decay is None else arrange(log_decay.astype(jnp.float32))[:, 0]
    state = call.first_state_BxKxExD
    wide_key, wide_value = fill_parts(key_size), fill_parts(value_size)
    state = jnp.pad(state, ((0, 0), (0, 0), (0, wide_key - key_size), (0, wide_value - value_size)))
    tokens = arrange(call.q_BxLxHxE), k, v, beta, log_decay
    o, state = cast(tuple[jax.Array, jax.Array], _rule(*tokens, state.reshape(-1, wide_key, wide_value)))
    o = jnp.moveaxis(o.reshape(batch, heads, chunks * CHUNK, wide_value), 1, 2)[:, :length, :, :value_size]
    return DeltaResult(o, state.reshape(batch, kv_heads, wide_key, wide_value)[:, :, :key_size, :value_size])


def prepare(
    q_NxGxTxCxE: jax.Array,
    k_NxTxCxE: jax.Array,
    v_NxTxCxD: jax.Array,
    beta_NxTxC: jax.Array,
    log_decay_NxTxC: jax.Array | None,
) -> tuple[WalkSides, jax.Array, jax.Array]:
    """Computes the operands that depend on no state, for all chunks side by side. Sizes are multiples of CHUNK.

    Returns:
        (the arrays of the walk, queries times the factors since the chunk's start, the weights of the tokens' additions
        for the queries).
    """
    q, k, v, beta, log_decay = q_NxGxTxCxE, k_NxTxCxE, v_NxTxCxD, beta_NxTxC, log_decay_NxTxC
    dtype, earlier = v.dtype, jnp.tri(CHUNK, dtype=bool)
    t = jnp.zeros_like(beta)
    if log_decay is not None:
        t = decays.in_tile(log_decay)
    new, seen = cast(tuple[jax.Array, jax.Array], _solve(k, beta, t, v))
    since, until = jnp.exp(t), jnp.exp(t[..., -1:] - t)
    weights = dot('ngtie,ntje->ngtij', q, k)
    if log_decay is None:
        weights = jnp.where(earlier, weights, 0.0)
    else:
        weights *= jnp.exp(jnp.where(earlier, _between(t), -jnp.inf))[:, None]
    k, q = k.astype(jnp.float32), q.astype(jnp.float32)
    sides = WalkSides(seen, (k * until[..., None]).astype(dtype), new, since[..., -1])
    return sides, (q * since[:, None, ..., None]).astype(dtype), weights.astype(dtype)


def _between(t_NxTxC: jax.Array) -> jax.Array:
    """Computes the logs of the factors from a token (the last axis) to a later one."""
    return t_NxTxC[..., :, None] - t_NxTxC[..., None, :]


@jax.custom_vjp
def _solve(
    k_NxTxCxE: jax.Array, beta_NxTxC: jax.Array, t_NxTxC: jax.Array, v_NxTxCxD: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns U and -W; t holds the running sums of a chunk's log factors, float32."""
    # Mosaic GPU takes half a second to import: only runs that use it wait for it.
    from lm.ops.delta_rule.gpu.systems import solve

    new, seen = solve(k_NxTxCxE, beta_NxTxC, t_NxTxC, v_NxTxCxD)
    return new, seen


def _solve_forward(*inputs):
    solved = _solve(*inputs)
    return solved, (inputs, solved)


def _solve_backward(residuals, cotangents: tuple[jax.Array, jax.Array]):
    from lm.ops.delta_rule.gpu.systems import solve_transposed

    (k, beta, t, v), (new, seen) = residuals
    # X (…) = U: the gradient of (…) is Xᵀ dU, and the gradient of A is -Xᵀ dU Uᵀ.
    dvalues, dkeys = solve_transposed(k, beta, t, *cotangents)
    dsystem = -dot('ntid,ntjd->ntij', dvalues, new) - dot('ntid,ntjd->ntij', dkeys, seen)
    dk, dbeta, dt = jax.vjp(_make_system, k, beta, t)[1](dsystem)
    more = jax.vjp(_make_right_sides, k, beta, t, v)[1]((dvalues.astype(jnp.float32), dkeys.astype(jnp.float32)))
    return dk + more[0], dbeta + more[1], dt + more[2], more[3]


_solve.defvjp(_solve_forward, _solve_backward)


def _make_system(k: jax.Array, beta: jax.Array, t: jax.Array) -> jax.Array:
    """Makes A."""
    factors = jnp.exp(jnp.where(jnp.tri(CHUNK, k=-1, dtype=bool), _between(t), -jnp.inf))
    return beta[..., None] * dot('ntie,ntje->ntij', k, k) * factors


def _make_right_sides(k: jax.Array, beta: jax.Array, t: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    k, v = k.astype(jnp.float32), v.astype(jnp.float32)
    return v * beta[..., None], k * (-beta * jnp.exp(t))[..., None]


@jax.custom_vjp
def _rule(*tokens_and_state: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Returns outputs, and the state after all chunks; the arguments are the tokens of `prepare`, and the state."""
    return _forward(*tokens_and_state)[:2]


# It is compiled as one function, which all layers share.
@jax.jit
def _forward(q, k, v, beta, log_decay, state) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes outputs, the state after all chunks, and the states before each chunk."""
    from lm.ops.delta_rule.gpu.states import walk_states

    sides, q, weights = prepare(q, k, v, beta, log_decay)
    before, new, after = walk_states(sides, state)
    o = dot('ngtce,nted->ngtcd', q, before)
    o += dot('ngtij,ntjd->ngtid', weights, new)
    return o.astype(v.dtype), after, before


def _rule_forward(*tokens_and_state: jax.Array | None):
    *tokens, _ = tokens_and_state
    o, after, before = _forward(*tokens_and_state)
    return (save_residual(o), after), (tokens, save_residual(before))


@jax.jit
def _rule_backward(residuals: tuple[list, jax.Array], cotangents: tuple[jax.Array, jax.Array]):
    from lm.ops.delta_rule.gpu.states import walk_states

    tokens, before = residuals
    do, dafter = cotangents
    (sides, q, weights), pull = jax.vjp(prepare, *tokens)
    dtype, do = do.dtype, do.astype(before.dtype)
    new = (sides.c_NxTxCxD + dot('ntce,nted->ntcd', sides.a_NxTxCxE, before)).astype(dtype)
    dnew = dot('ngtij,ngtid->ntjd', weights, do).astype(dtype)
    dstate = dot('ngtce,ngtcd->nted', q, do).astype(dtype)
    turned = WalkSides(sides.b_NxTxCxE, sides.a_NxTxCxE, dnew, sides.w, dstate)
    dlater, dnew, dfirst = walk_states(turned, dafter, backwards=True)
    dsides = WalkSides(
        dot('ntcd,nted->ntce', dnew, before).astype(dtype),
        dot('ntcd,nted->ntce', new, dlater).astype(dtype),
        dnew,
        dot('nted,nted->nt', before, dlater),
    )
    dq = dot('ngtcd,nted->ngtce', do, before).astype(dtype)
    dweights = dot('ngtid,ntjd->ngtij', do, new).astype(dtype)
    return *pull((dsides, dq, dweights)), dfirst


_rule.defvjp(_rule_forward, _rule_backward)
