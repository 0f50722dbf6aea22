"""Linear attention as its formulas read, with all n × n weights at once. It is for tests and for reading."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from lm.ops.decay import pairwise
from lm.ops.linear_attention.types import (
    LOCAL_BLOCK,
    ExpKernel,
    LinearCall,
    LinearResult,
    LocalKernel,
    Options,
    Sides,
    State,
    decay_state,
)
from lm.ops.powers import quotient


def linear_attention(call: LinearCall) -> LinearResult:
    """Computes the call. The expansion of its state is not packed."""
    if call.channel_log_decay_BxLxKxE is not None:
        return _recur(call)
    options, dtype = call.options, call.v_BxLxKxD.dtype
    x_BxLxHxF = options.compute_features(call.q_parameters, call.q_BxLxHxE, True).astype(jnp.float32)
    y_BxLxKxF = options.compute_features(call.k_parameters, call.k_BxLxKxE, False).astype(jnp.float32)
    v_BxLxKxD = call.v_BxLxKxD.astype(jnp.float32)
    groups = x_BxLxHxF.shape[2] // y_BxLxKxF.shape[2]
    repeat = functools.partial(jnp.repeat, repeats=groups, axis=2)

    w_BxHxLxM = options.weigh(jnp.einsum('blhf,bmhf->bhlm', x_BxLxHxF, repeat(y_BxLxKxF)))
    seen_LxM, near_LxM = find_visible(options, x_BxLxHxF.shape[1])
    w_BxHxLxM = jnp.where(seen_LxM, w_BxHxLxM, 0.0)
    decay_BxHxLxM, decay_BxHxLx1 = _expand_decay(call.log_decay_BxLxK, groups)
    w_BxHxLxM *= jnp.exp(decay_BxHxLxM)
    scale_BxHxLx1 = bias_scale_BxHxLx1 = jnp.float32(1.0)
    if options.local is not None and call.local is not None:
        decay, visible = (decay_BxHxLxM, decay_BxHxLx1), (seen_LxM, near_LxM)
        exact, scale_BxHxLx1, bias_scale_BxHxLx1 = _weigh_exactly(call, options.local, call.local, decay, visible)
        w_BxHxLxM = jnp.where(near_LxM, exact, w_BxHxLxM * scale_BxHxLx1)
    o_BxHxLxD = jnp.einsum('bhlm,bmhd->bhld', w_BxHxLxM, repeat(v_BxLxKxD))
    total_BxHxLx1 = w_BxHxLxM.sum(-1, keepdims=True)

    if call.initial_state is not None:
        factor_BxHxLx1 = scale_BxHxLx1 * jnp.exp(decay_BxHxLx1)
        kv_BxHxRxD = jnp.repeat(call.initial_state.kv_BxKxRxD, groups, axis=1)
        o_BxHxLxD += factor_BxHxLx1 * jnp.einsum('blhr,bhrd->bhld', expand(options, x_BxLxHxF), kv_BxHxRxD)
        sums_BxHxR = jnp.repeat(flatten_totals(call.initial_state), groups, axis=1)
        total_BxHxLx1 += factor_BxHxLx1 * jnp.einsum('blhr,bhr->bhl', expand(options, x_BxLxHxF), sums_BxHxR)[..., None]
    if options.normalize:
        o_BxHxLxD = quotient(o_BxHxLxD, options.denominator_bias * bias_scale_BxHxLx1 + total_BxHxLx1)
    state = None
    if call.with_state:
        state = summarize(options, y_BxLxKxF, v_BxLxKxD, call.log_decay_BxLxK)
        if call.initial_state is not None:
            before = call.initial_state
            if call.log_decay_BxLxK is not None:
                before = decay_state(before, call.log_decay_BxLxK.astype(jnp.float32).sum(1))
            state = jax.tree.map(jnp.add, before, state)
    return LinearResult(o_BxHxLxD.swapaxes(1, 2).astype(dtype), state)


def _recur(call: LinearCall) -> LinearResult:
    """Computes a call whose channels have factors of their own, token by token."""
    groups = call.q_BxLxHxE.shape[2] // call.k_BxLxKxE.shape[2]
    state = call.initial_state
    if state is None:
        y_Bx1xKxE, v_Bx1xKxD = (jnp.zeros_like(x[:, :1], jnp.float32) for x in (call.k_BxLxKxE, call.v_BxLxKxD))
        state = summarize(call.options, y_Bx1xKxE, v_Bx1xKxD)

    def step(kv, token):
        q_BxHxE, k_BxKxE, v_BxKxD, log_decay_BxKxE = token
        kv = jnp.exp(log_decay_BxKxE)[..., None] * kv + k_BxKxE[..., :, None] * v_BxKxD[..., None, :]
        return kv, jnp.einsum('bhed,bhe->bhd', jnp.repeat(kv, groups, axis=1), q_BxHxE)

    tokens = (call.q_BxLxHxE, call.k_BxLxKxE, call.v_BxLxKxD, call.all_log_decay_BxLxKxE)
    tokens = jax.tree.map(lambda x: jnp.moveaxis(x.astype(jnp.float32), 1, 0), tokens)
    kv, o_LxBxHxD = jax.lax.scan(step, state.kv_BxKxRxD, tokens)
    o_BxLxHxD = jnp.moveaxis(o_LxBxHxD, 0, 1).astype(call.v_BxLxKxD.dtype)
    return LinearResult(o_BxLxHxD, State(kv, state.totals) if call.with_state else None)


def find_visible(options: Options, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns masks [L, M]: the keys that a query sees, and the keys among them that the exact kernel weighs."""
    i, j = np.arange(length)[:, None], np.arange(length)
    seen = (j <= i) | (not options.causal)
    if options.local is None:
        return seen, np.zeros_like(seen)
    block = options.block or LOCAL_BLOCK
    near = (i // block == j // block) if options.window is None else (j > i - options.window)
    return seen, seen & near


def _expand_decay(log_decay_BxLxK: jax.Array | None, groups: int) -> tuple[jax.Array, jax.Array]:
    """Returns log factors between query and key, [B, H, L, M], and from the first token to each query, [B, H, L, 1]."""
    if log_decay_BxLxK is None:
        return jnp.float32(0.0), jnp.float32(0.0)
    log_decay_BxKxL = log_decay_BxLxK.astype(jnp.float32).swapaxes(1, 2)
    pairs_BxHxLxM = jnp.repeat(pairwise(log_decay_BxKxL), groups, axis=1)
    return pairs_BxHxLxM, jnp.repeat(jnp.cumsum(log_decay_BxKxL, -1), groups, axis=1)[..., None]


def _weigh_exactly(
    call: LinearCall,
    local: LocalKernel,
    vectors: Sides[jax.Array],
    decay: tuple[jax.Array, jax.Array],
    visible: tuple[np.ndarray, np.ndarray],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes exact weights, [B, H, L, M]; `decay` and `visible` are as above.

    Also returned are the factors of approximate weights and of the bias in a query's numerator and denominator,
    [B, H, L, 1].
    """
    (pairs_BxHxLxM, start_BxHxLx1), (seen_LxM, near_LxM) = decay, visible
    q, k = (x.astype(jnp.float32) for x in vectors)
    s_BxHxLxM = jnp.einsum('blhc,bmhc->bhlm', q, jnp.repeat(k, q.shape[2] // k.shape[2], axis=2))
    if not isinstance(local, ExpKernel):
        return local.weigh(s_BxHxLxM) * jnp.exp(pairs_BxHxLxM), jnp.float32(1.0), jnp.float32(1.0)
    s_BxHxLxM = jnp.where(near_LxM, s_BxHxLxM * local.scale, -jnp.inf) + pairs_BxHxLxM
    if local.relative:
        s_BxHxLxM -= s_BxHxLxM.max(-1, keepdims=True)
    log_BxLxH, log_BxHxLx1 = call.options.find_log_factor(call.q_parameters, call.q_BxLxHxE), jnp.float32(0.0)
    if log_BxLxH is not None:
        log_BxHxLx1 = log_BxLxH.swapaxes(1, 2)[..., None]
    # Where nothing is older than the window, only the largest exponent itself keeps its weight from underflow.
    has_older_Lx1 = (
        (seen_LxM & ~near_LxM & (pairs_BxHxLxM > -jnp.inf)).any(-1, keepdims=True)
        | bool(call.options.denominator_bias)
        | ((call.initial_state is not None) & (start_BxHxLx1 > -jnp.inf))
    )
    m_BxHxLx1 = jnp.maximum(s_BxHxLxM.max(-1, keepdims=True), jnp.where(has_older_Lx1, log_BxHxLx1, -jnp.inf))
    if call.options.denominator_bias:
        m_BxHxLx1 = jnp.maximum(m_BxHxLx1, 0.0)
    others = jnp.exp(log_BxHxLx1 - jnp.where(has_older_Lx1, m_BxHxLx1, log_BxHxLx1))
    scale_BxHxLx1 = jnp.where(has_older_Lx1, others, 0.0)
    return jnp.exp(s_BxHxLxM - m_BxHxLx1), scale_BxHxLx1, jnp.exp(-jnp.maximum(m_BxHxLx1, 0.0))


def list_powers(options: Options, x: jax.Array) -> list[tuple[float, jax.Array]]:
    """Lists (coefficient, x^{⊗n} flattened) for each n with a coefficient other than 0."""
    result, power = [], jnp.ones((*x.shape[:-1], 1), x.dtype)
    for n, coefficient in enumerate(options.powers):
        power = power if n == 0 else (power[..., :, None] * x[..., None, :]).reshape(*x.shape[:-1], -1)
        if coefficient:
            result.append((coefficient, power))
    return result


def expand(options: Options, x: jax.Array) -> jax.Array:
    """Computes φ of queries with the coefficients: ⟨expand(x), Σ y^{⊗n}⟩ is the approximate weight."""
    return jnp.concatenate([c * power for c, power in list_powers(options, x)], axis=-1)


def summarize(
    options: Options, y_BxLxKxF: jax.Array, v_BxLxKxD: jax.Array, log_decay_BxLxK: jax.Array | None = None
) -> State:
    """Computes the state after these keys."""
    parts = [power for _, power in list_powers(options, y_BxLxKxF)]
    if log_decay_BxLxK is not None:
        pairs_BxKxL = pairwise(log_decay_BxLxK.astype(jnp.float32).swapaxes(1, 2))[:, :, -1]
        parts = [part * jnp.exp(pairs_BxKxL).swapaxes(1, 2)[..., None] for part in parts]
    kv_BxKxRxD = jnp.einsum('blkr,blkd->bkrd', jnp.concatenate(parts, axis=-1), v_BxLxKxD)
    batch, _, heads, size = y_BxLxKxF.shape
    degrees = [n for n, c in enumerate(options.powers) if c]
    totals = (p.sum(1).reshape(batch, heads, *[size] * n) for n, p in zip(degrees, parts, strict=True))
    return State(kv_BxKxRxD, tuple(totals))


def flatten_totals(state: State) -> jax.Array:
    """Joins the totals to one [B, K, R] array in the order of `expand`."""
    batch, heads = state.kv_BxKxRxD.shape[:2]
    return jnp.concatenate([t.reshape(batch, heads, -1) for t in state.totals], axis=-1)
