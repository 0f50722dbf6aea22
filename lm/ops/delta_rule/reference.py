"""The delta rule token by token, as its formula reads. For tests and for reading."""

import jax
import jax.numpy as jnp
from jax import lax

from lm.ops.delta_rule.unit import lengths


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
    groups, dtype = q_BxLxHxE.shape[2] // k_BxLxKxE.shape[2], v_BxLxKxD.dtype
    if log_decay_BxLxK is None:
        log_decay_BxLxK = jnp.zeros_like(beta_BxLxK)

    def step(state, token):
        q_BxHxE, k_BxKxE, v_BxKxD, beta_BxK, log_decay_BxK = token
        state *= jnp.exp(log_decay_BxK)[..., None, None]
        new_BxKxD = beta_BxK[..., None] * (v_BxKxD - jnp.einsum('bked,bke->bkd', state, k_BxKxE))
        state += k_BxKxE[..., :, None] * new_BxKxD[..., None, :]
        return state, jnp.einsum('bhed,bhe->bhd', jnp.repeat(state, groups, axis=1), q_BxHxE)

    tokens = (q_BxLxHxE, k_BxLxKxE, v_BxLxKxD, beta_BxLxK, log_decay_BxLxK)
    tokens = jax.tree.map(lambda x: jnp.moveaxis(x.astype(jnp.float32), 1, 0), tokens)
    state, o_LxBxHxD = lax.scan(step, initial_state, tokens)
    return jnp.moveaxis(o_LxBxHxD, 0, 1).astype(dtype), state


def unsupported(*args) -> None:
    """Everything is supported."""
