"""The delta rule on Hopper GPUs: kernels solve the systems of all chunks at once, and one walks from chunk to chunk.

Formulas as in `lm.ops.delta_rule.xla`, with factors from t, the sums of the logs of a chunk's tokens. First comes what
depends on no state; n_t = U_t - W_t S_t and S_{t+1} are the kernel's, and so are their gradients, which are of the
same form. Kept for the backward pass are the arguments and the state before each chunk.

N key heads of all sequences, G queries of each, T chunks of C tokens, E key size, D value size.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lm.ops import decay as decays
from lm.ops import platform
from lm.ops.delta_rule.unit import lengths
from lm.ops.dots import dot
from lm.ops.residuals import saved

CHUNK = 64


class Prepared(NamedTuple):
    """What the states and the outputs are made of, bfloat16 but for `whole`."""

    new_NxTxCxD: jax.Array
    """U: what the chunk would add at its keys if the state before it were 0."""
    seen_NxTxCxE: jax.Array
    """-W: times the state, what it adds because of it."""
    k_NxTxCxE: jax.Array
    """Keys, faded until the chunk's end."""
    whole_NxT: jax.Array
    """The factor of the whole chunk, float32."""
    q_NxGxTxCxE: jax.Array
    """Queries, faded since the chunk's start."""
    weights_NxGxTxCxC: jax.Array
    """Of what the chunk's own tokens add."""


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
    return platform.per_device(_of_device, (True,) * len(arrays))(*arrays)


def unsupported(q, k, v, beta, log_decay, initial_state) -> str | None:
    """Why the kernel cannot compute this call, or None."""
    if reason := platform.without_mosaic_gpu():
        return reason
    if dtypes := {a.dtype for a in (q, k, v)} - {jnp.dtype('bfloat16')}:
        return f'takes arrays that are all bfloat16, not {", ".join(sorted(map(str, dtypes)))}'
    if (widest := max(k.shape[-1], v.shape[-1])) > CHUNK:
        return f'takes heads of up to {CHUNK}, not {widest}'
    return platform.uneven_batch(q.shape[0])


def _of_device(q, k, v, beta, log_decay, state):
    batch, length, heads, key_size = q.shape
    kv_heads, value_size = v.shape[2:]
    chunks = -(-length // CHUNK)

    def heads_apart(x):
        """[B, L, heads, …] → [B · K, G, T, C, …]; tokens of zeros at the end, which leave the state as it is."""
        pad = [(0, 0), (0, chunks * CHUNK - length), (0, 0)] + [(0, CHUNK - size) for size in x.shape[3:]]
        x = jnp.moveaxis(jnp.pad(x, pad), 1, 2)
        return x.reshape(batch * kv_heads, x.shape[1] // kv_heads, chunks, CHUNK, *x.shape[3:])

    k, v, beta = (heads_apart(x)[:, 0] for x in (k, v, beta.astype(jnp.float32)))
    log_decay = None if log_decay is None else heads_apart(log_decay.astype(jnp.float32))[:, 0]
    state = jnp.pad(state, ((0, 0), (0, 0), (0, CHUNK - key_size), (0, CHUNK - value_size)))
    o, state = _rule(heads_apart(q), k, v, beta, log_decay, state.reshape(-1, CHUNK, CHUNK))
    o = jnp.moveaxis(o.reshape(batch, heads, chunks * CHUNK, CHUNK), 1, 2)[:, :length, :, :value_size]
    return o, state.reshape(batch, kv_heads, CHUNK, CHUNK)[:, :, :key_size, :value_size]


def prepare(q_NxGxTxCxE, k_NxTxCxE, v_NxTxCxD, beta_NxTxC, log_decay_NxTxC) -> Prepared:
    """Of all chunks, side by side."""
    dtype, earlier = v_NxTxCxD.dtype, jnp.tri(CHUNK, dtype=bool)
    t_NxTxC = jnp.zeros_like(beta_NxTxC)
    if log_decay_NxTxC is not None:
        t_NxTxC = decays.in_tile(log_decay_NxTxC)
    new, seen = _solved(k_NxTxCxE, beta_NxTxC, t_NxTxC, v_NxTxCxD)
    since, until = jnp.exp(t_NxTxC), jnp.exp(t_NxTxC[..., -1:] - t_NxTxC)
    weights = dot('ngtie,ntje->ngtij', q_NxGxTxCxE, k_NxTxCxE)
    if log_decay_NxTxC is None:
        weights = jnp.where(earlier, weights, 0.0)
    else:
        weights *= jnp.exp(jnp.where(earlier, _between(t_NxTxC), -jnp.inf))[:, None]
    k, q = k_NxTxCxE.astype(jnp.float32), q_NxGxTxCxE.astype(jnp.float32)
    return Prepared(
        new,
        seen,
        (k * until[..., None]).astype(dtype),
        since[..., -1],
        (q * since[:, None, ..., None]).astype(dtype),
        weights.astype(dtype),
    )


def _between(t_NxTxC: jax.Array) -> jax.Array:
    """The logs of the factors from a token (the last axis) to a later one."""
    return t_NxTxC[..., :, None] - t_NxTxC[..., None, :]


@jax.custom_vjp
def _solved(k, beta, t, v) -> tuple[jax.Array, jax.Array]:
    """U and -W, from keys, β, sums of logs and values."""
    # Mosaic GPU takes half a second to import, and only runs that use it shall wait for it.
    from lm.ops.delta_rule.gpu.systems import solutions

    return tuple(solutions(k, beta, t, v))


def _solved_forward(*inputs):
    solved = _solved(*inputs)
    return solved, (inputs, solved)


def _solved_backward(residuals, cotangents):
    from lm.ops.delta_rule.gpu.systems import gradients

    (k, beta, t, v), (new, seen) = residuals
    # X (…) = U: the gradient of (…) is Xᵀ dU, and that of A is -Xᵀ dU Uᵀ.
    dvalues, dkeys = gradients(k, beta, t, *cotangents)
    dsystem = -dot('ntid,ntjd->ntij', dvalues, new) - dot('ntid,ntjd->ntij', dkeys, seen)
    dk, dbeta, dt = jax.vjp(_system, k, beta, t)[1](dsystem)
    more = jax.vjp(_right_sides, k, beta, t, v)[1]((dvalues.astype(jnp.float32), dkeys.astype(jnp.float32)))
    return dk + more[0], dbeta + more[1], dt + more[2], more[3]


_solved.defvjp(_solved_forward, _solved_backward)


def _system(k, beta, t):
    """A."""
    faded = jnp.exp(jnp.where(jnp.tri(CHUNK, k=-1, dtype=bool), _between(t), -jnp.inf))
    return beta[..., None] * dot('ntie,ntje->ntij', k, k) * faded


def _right_sides(k, beta, t, v):
    k, v = k.astype(jnp.float32), v.astype(jnp.float32)
    return v * beta[..., None], k * (-beta * jnp.exp(t))[..., None]


@jax.custom_vjp
def _rule(q, k, v, beta, log_decay, state):
    return _forward(q, k, v, beta, log_decay, state)[:2]


# Compiled as one function, which all layers share.
@jax.jit
def _forward(q, k, v, beta, log_decay, state):
    """Outputs, the state after all, and those before each chunk."""
    from lm.ops.delta_rule.gpu.states import states

    p = prepare(q, k, v, beta, log_decay)
    before, new, after = states(p.seen_NxTxCxE, p.k_NxTxCxE, p.new_NxTxCxD, p.whole_NxT, state)
    o = dot('ngtce,nted->ngtcd', p.q_NxGxTxCxE, before) + dot('ngtij,ntjd->ngtid', p.weights_NxGxTxCxC, new)
    return o.astype(v.dtype), after, before


def _rule_forward(*inputs):
    o, after, before = _forward(*inputs)
    return (saved(o), after), (inputs, saved(before))


@jax.jit
def _rule_backward(residuals, cotangents):
    from lm.ops.delta_rule.gpu.states import states

    (*tokens, _), before = residuals
    do, dafter = cotangents
    p, pull = jax.vjp(prepare, *tokens)
    dtype, do = do.dtype, do.astype(before.dtype)
    new = (p.new_NxTxCxD + dot('ntce,nted->ntcd', p.seen_NxTxCxE, before)).astype(dtype)
    dnew = dot('ngtij,ngtid->ntjd', p.weights_NxGxTxCxC, do).astype(dtype)
    dstate = dot('ngtce,ngtcd->nted', p.q_NxGxTxCxE, do).astype(dtype)
    backwards = functools.partial(states, backwards=True)
    dlater, dnew, dfirst = backwards(p.k_NxTxCxE, p.seen_NxTxCxE, dnew, p.whole_NxT, dafter, dstate)
    dprepared = Prepared(
        dnew,
        dot('ntcd,nted->ntce', dnew, before).astype(dtype),
        dot('ntcd,nted->ntce', new, dlater).astype(dtype),
        dot('nted,nted->nt', before, dlater),
        dot('ngtcd,nted->ngtce', do, before).astype(dtype),
        dot('ngtid,ntjd->ngtij', do, new).astype(dtype),
    )
    return *pull(dprepared), dfirst


_rule.defvjp(_rule_forward, _rule_backward)
