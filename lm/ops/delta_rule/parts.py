"""The delta rule over windows that are split over devices (`lm.ops.sequence`).

What a part does to the state before it is affine, S → P S + R, and so is what its queries read of it. Each device walks
its part once, with the columns of the state that hold R, begun at 0, beside those that hold P, begun at I; learns in a
logarithmic number of exchanges what the parts before it come to; and adds what its queries read of that.
"""

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
) -> jax.Array:
    """The outputs [B, L, H, D] of this part; arguments as in `lm.ops.delta_rule`."""
    batch, length, heads, size = k_BxLxKxE.shape
    identity = jnp.eye(size, dtype=jnp.float32)
    zeros = jnp.zeros((batch, heads, size, v_BxLxKxD.shape[-1]), jnp.float32)
    start = jnp.concatenate([zeros, jnp.broadcast_to(identity, (batch, heads, size, size))], axis=-1)
    columns = jnp.pad(v_BxLxKxD.astype(jnp.float32), ((0, 0), (0, 0), (0, 0), (0, size)))
    o, state = xla.delta_rule(q_BxLxHxE, k_BxLxKxE, columns, beta_BxLxK, log_decay_BxLxK, start)
    own, through = jnp.split(o, [v_BxLxKxD.shape[-1]], axis=-1)
    before = _carried(*jnp.split(state - start, [v_BxLxKxD.shape[-1]], axis=-1))
    through = through.reshape(batch, length, heads, -1, size)
    o = own + dot('blkge,bked->blkgd', through, before).reshape(own.shape)
    return o.astype(v_BxLxKxD.dtype)


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
