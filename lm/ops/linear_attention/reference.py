"""Linear attention written as the formulas read: all n × n weights at once. For tests and for reading."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lm.ops.decay import pairwise
from lm.ops.linear_attention.types import LOCAL_BLOCK, Options, State, faded
from lm.ops.powers import quotient


def linear_attention(
    q_BxLxHxE: jax.Array,
    k_BxLxKxE: jax.Array,
    v_BxLxKxD: jax.Array,
    q_parameters: Any,
    k_parameters: Any,
    q_local_BxLxHxC: jax.Array | None,
    k_local_BxLxKxC: jax.Array | None,
    initial_state: State | None,
    log_decay_BxLxK: jax.Array | None = None,
    *,
    options: Options,
    with_state: bool,
) -> tuple[jax.Array, State | None]:
    """Arguments as in `lm.ops.linear_attention`. The expansion of its state is not packed."""
    x_BxLxHxF = options.features(q_parameters, q_BxLxHxE, True).astype(jnp.float32)
    y_BxLxKxF = options.features(k_parameters, k_BxLxKxE, False).astype(jnp.float32)
    v_BxLxKxD, dtype = v_BxLxKxD.astype(jnp.float32), v_BxLxKxD.dtype
    groups = x_BxLxHxF.shape[2] // y_BxLxKxF.shape[2]
    expanded = functools.partial(jnp.repeat, repeats=groups, axis=2)

    w_BxHxLxM = options.approximate(jnp.einsum('blhf,bmhf->bhlm', x_BxLxHxF, expanded(y_BxLxKxF)))
    length = x_BxLxHxF.shape[1]
    older_LxM, nearby_LxM = visible(options, length)
    w_BxHxLxM = jnp.where(older_LxM, w_BxHxLxM, 0.0)
    fade_BxHxLxM = start_BxHxLx1 = 0.0
    if log_decay_BxLxK is not None:
        log_decay_BxKxL = log_decay_BxLxK.astype(jnp.float32).swapaxes(1, 2)
        fade_BxHxLxM = jnp.repeat(pairwise(log_decay_BxKxL), groups, axis=1)
        start_BxHxLx1 = jnp.repeat(jnp.cumsum(log_decay_BxKxL, -1), groups, axis=1)[..., None]
        w_BxHxLxM *= jnp.exp(fade_BxHxLxM)
    shrink_BxHxLx1 = jnp.float32(1.0)
    if options.local is not None:
        q, k = q_local_BxLxHxC.astype(jnp.float32), k_local_BxLxKxC.astype(jnp.float32)
        s_BxHxLxM = jnp.einsum('blhc,bmhc->bhlm', q, expanded(k))
        if options.local.stable:
            s_BxHxLxM = jnp.where(nearby_LxM, s_BxHxLxM * options.local.scale, -jnp.inf) + fade_BxHxLxM
            # Where nothing is older than the window, only the largest exponent itself keeps its weight from underflow.
            has_older_Lx1 = (
                (older_LxM & ~nearby_LxM & (fade_BxHxLxM > -jnp.inf)).any(-1, keepdims=True)
                | bool(options.denominator_bias)
                | ((initial_state is not None) & (start_BxHxLx1 > -jnp.inf))
            )
            m_BxHxLx1 = jnp.maximum(s_BxHxLxM.max(-1, keepdims=True), jnp.where(has_older_Lx1, 0.0, -jnp.inf))
            shrink_BxHxLx1 = jnp.where(has_older_Lx1, jnp.exp(-m_BxHxLx1), 0.0)
            exact_BxHxLxM = jnp.exp(s_BxHxLxM - m_BxHxLx1)
        else:
            exact_BxHxLxM = options.local.weights(s_BxHxLxM) * jnp.exp(fade_BxHxLxM)
        w_BxHxLxM = jnp.where(nearby_LxM, exact_BxHxLxM, w_BxHxLxM * shrink_BxHxLx1)
    o_BxHxLxD = jnp.einsum('bhlm,bmhd->bhld', w_BxHxLxM, expanded(v_BxLxKxD))
    total_BxHxLx1 = w_BxHxLxM.sum(-1, keepdims=True)

    if initial_state is not None:
        faded_BxHxLx1 = shrink_BxHxLx1 * jnp.exp(start_BxHxLx1)
        kv_BxHxRxD = jnp.repeat(initial_state.kv_BxKxRxD, groups, axis=1)
        o_BxHxLxD += faded_BxHxLx1 * jnp.einsum('blhr,bhrd->bhld', expand(options, x_BxLxHxF), kv_BxHxRxD)
        sums_BxHxR = jnp.repeat(flatten_totals(options, initial_state), groups, axis=1)
        total_BxHxLx1 += faded_BxHxLx1 * jnp.einsum('blhr,bhr->bhl', expand(options, x_BxLxHxF), sums_BxHxR)[..., None]
    if options.normalize:
        o_BxHxLxD = quotient(o_BxHxLxD, options.denominator_bias * shrink_BxHxLx1 + total_BxHxLx1)
    state = None
    if with_state:
        state = summarize(options, y_BxLxKxF, v_BxLxKxD, log_decay_BxLxK)
        if initial_state is not None:
            before = initial_state
            if log_decay_BxLxK is not None:
                before = faded(before, log_decay_BxLxK.astype(jnp.float32).sum(1))
            state = jax.tree.map(jnp.add, before, state)
    return o_BxHxLxD.swapaxes(1, 2).astype(dtype), state


def unsupported(*args, **options) -> None:
    """Everything is supported."""


def visible(options: Options, length: int) -> tuple[np.ndarray, np.ndarray]:
    """[L, L] booleans: which keys a query sees at all, and which of them the exact kernel weighs."""
    i, j = np.arange(length)[:, None], np.arange(length)
    seen = (j <= i) | (not options.causal)
    if options.local is None:
        return seen, np.zeros_like(seen)
    block = options.block or LOCAL_BLOCK
    near = (i // block == j // block) if options.window is None else (j > i - options.window)
    return seen, seen & near


def powers_of(options: Options, x: jax.Array) -> list[tuple[float, jax.Array]]:
    """(coefficient, x^{⊗n} flattened) for each n with a coefficient other than 0."""
    result, power = [], jnp.ones((*x.shape[:-1], 1), x.dtype)
    for n, coefficient in enumerate(options.powers):
        power = power if n == 0 else (power[..., :, None] * x[..., None, :]).reshape(*x.shape[:-1], -1)
        if coefficient:
            result.append((coefficient, power))
    return result


def expand(options: Options, x: jax.Array) -> jax.Array:
    """φ of queries: ⟨expand(x), Σ y^{⊗n}⟩ is the approximate weight. The coefficients are the queries' part."""
    return jnp.concatenate([c * power for c, power in powers_of(options, x)], axis=-1)


def summarize(
    options: Options, y_BxLxKxF: jax.Array, v_BxLxKxD: jax.Array, log_decay_BxLxK: jax.Array | None = None
) -> State:
    """The state after these keys."""
    parts = [power for _, power in powers_of(options, y_BxLxKxF)]
    if log_decay_BxLxK is not None:
        fade_BxKxL = pairwise(log_decay_BxLxK.astype(jnp.float32).swapaxes(1, 2))[:, :, -1]
        parts = [part * jnp.exp(fade_BxKxL).swapaxes(1, 2)[..., None] for part in parts]
    kv_BxKxRxD = jnp.einsum('blkr,blkd->bkrd', jnp.concatenate(parts, axis=-1), v_BxLxKxD)
    batch, _, heads, size = y_BxLxKxF.shape
    degrees = [n for n, c in enumerate(options.powers) if c]
    totals = (p.sum(1).reshape(batch, heads, *[size] * n) for n, p in zip(degrees, parts, strict=True))
    return State(kv_BxKxRxD, tuple(totals))


def flatten_totals(options: Options, state: State) -> jax.Array:
    """The totals as one [B, K, R] array in the order of `expand`."""
    batch, heads = state.kv_BxKxRxD.shape[:2]
    return jnp.concatenate([t.reshape(batch, heads, -1) for t in state.totals], axis=-1)


def plain_blocks(
    x_BxLxHxF: jax.Array,
    y_BxLxHxF: jax.Array,
    v_BxLxHxD: jax.Array,
    q_local_BxLxHxC: jax.Array,
    k_local_BxLxHxC: jax.Array,
    *,
    degree: int,
    block: int,
    denominator_bias: float = 1.0,
) -> jax.Array:
    """PolySketchFormer §3 as its formulas read, in linear time: the yardstick of the fast implementations.

    The self-tensors of all keys, multiplied with [v 1], summed over each block (H_l), and accumulated over all blocks
    (Z_l); exact weights in the block. The block must divide the length.
    """
    batch, length, heads, _ = x_BxLxHxF.shape

    def cut(a):
        return a.reshape(batch, length // block, block, heads, -1).transpose(0, 3, 1, 2, 4)

    x, y, q, k = (cut(a) for a in (x_BxLxHxF, y_BxLxHxF, q_local_BxLxHxC, k_local_BxLxHxC))
    v1 = cut(jnp.concatenate([v_BxLxHxD, jnp.ones_like(v_BxLxHxD[..., :1])], axis=-1))
    sums = jnp.einsum('bhnti,bhntj,bhntd->bhnijd', y, y, v1)
    earlier = jnp.cumsum(sums, axis=2) - sums
    weights = jnp.tril(jnp.einsum('bhntc,bhnsc->bhnts', q, k) ** degree)
    total = weights @ v1 + jnp.einsum('bhnti,bhntj,bhnijd->bhntd', x, x, earlier)
    o = total[..., :-1] / (denominator_bias + total[..., -1:])
    return o.transpose(0, 2, 3, 1, 4).reshape(v_BxLxHxD.shape)
