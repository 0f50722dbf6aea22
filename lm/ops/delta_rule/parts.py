"""The delta rule over windows that are split over devices (`lm.ops.sequence`).

What a part does to the state before it is affine, S → P S + R, and so is what its queries read of it. Each device walks
its part once, with the columns of the state that hold R, begun at 0, beside those that hold P, begun at I; learns in a
logarithmic number of exchanges what the parts before it come to; and adds what its queries read of that.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from lm.ops import sequence
from lm.ops.delta_rule import xla
from lm.ops.dots import dot


def delta_rule(
    q_BxLxHxE: jax.Array,
    k_BxLxKxE: jax.Array,
    v_BxLxKxD: jax.Array,
    beta_BxLxK: jax.Array,
    log_decay_BxLxK: jax.Array | None,
    query_length: float | None = None,
) -> jax.Array:
    """The outputs [B, L, H, D] of this part; arguments as in `lm.ops.delta_rule`."""
    wide = v_BxLxKxD.astype(jnp.float32)
    o_BxLxHxD = of_part(xla.delta_rule, q_BxLxHxE, k_BxLxKxE, wide, beta_BxLxK, log_decay_BxLxK, query_length)
    return o_BxLxHxD.astype(v_BxLxKxD.dtype)


def of_part(walk: Callable, q, k, v, beta, log_decay, query_length) -> jax.Array:
    """The outputs of this part; `walk`: an implementation's `delta_rule`, which walks it once."""
    size = v.shape[-1]
    columns, start = extended(k, v)
    o, state = walk(q, k, columns, beta, log_decay, start, query_length)
    own, through = jnp.split(o, [size], axis=-1)
    before = _carried(*jnp.split(state - start, [size], axis=-1))
    through = through.reshape(*k.shape[:3], -1, k.shape[-1])
    return own + dot('blkge,bked->blkgd', through, before).reshape(own.shape).astype(v.dtype)


def extended(k_BxLxKxE: jax.Array, v_BxLxKxD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The values, [B, L, K, D + E], and the state before them, [B, K, E, D + E], columns for P beside those of R."""
    batch, _, heads, size = k_BxLxKxE.shape
    zeros = jnp.zeros((batch, heads, size, v_BxLxKxD.shape[-1]), jnp.float32)
    identity = jnp.broadcast_to(jnp.eye(size, dtype=jnp.float32), (batch, heads, size, size))
    columns = jnp.pad(v_BxLxKxD, ((0, 0), (0, 0), (0, 0), (0, size)))
    return columns, jnp.concatenate([zeros, identity], axis=-1)


def unsupported(*args) -> None:
    """Everything is supported."""


def _carried(added_BxKxExD, change_BxKxExE):
    """The state after all parts before this one, of what each of them adds to it, R, and how it changes it, P - I."""

    def compose(earlier, later):
        (added, change), (more, again) = earlier, later
        both = dot('bkef,bkfd->bked', again, jnp.concatenate([added, change], axis=-1))
        again_added, again_change = jnp.split(both, [added.shape[-1]], axis=-1)
        return added + again_added + more, change + again_change + again

    return sequence.carried((added_BxKxExD, change_BxKxExE), compose)[0]
