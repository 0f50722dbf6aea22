"""The delta rule token by token, as its formula reads. It is for tests and for reading."""

import jax
import jax.numpy as jnp
from jax import lax

from lm.ops.delta_rule.types import DeltaCall, DeltaResult
from lm.ops.delta_rule.unit import scale_vectors
from lm.ops.formulas import forget_and_learn


def delta_rule(call: DeltaCall) -> DeltaResult:
    """Computes the call."""
    call = scale_vectors(call)
    log_decay = call.all_log_decay_BxLxKxE
    if log_decay is None:
        log_decay_BxLxK = jnp.zeros_like(call.beta_BxLxK) if call.log_decay_BxLxK is None else call.log_decay_BxLxK
        log_decay = log_decay_BxLxK[..., None]

    def step(state, token):
        q_BxHxE, k_BxKxE, v_BxKxD, beta_BxK, log_decay = token
        state = forget_and_learn(jnp, state, k_BxKxE, v_BxKxD, beta_BxK, jnp.exp(log_decay))
        return state, jnp.einsum('bhed,bhe->bhd', jnp.repeat(state, call.groups, axis=1), q_BxHxE)

    tokens = (call.q_BxLxHxE, call.k_BxLxKxE, call.v_BxLxKxD, call.beta_BxLxK, log_decay)
    tokens = jax.tree.map(lambda x: jnp.moveaxis(x.astype(jnp.float32), 1, 0), tokens)
    state, o_LxBxHxD = lax.scan(step, call.first_state_BxKxExD, tokens)
    return DeltaResult(jnp.moveaxis(o_LxBxHxD, 0, 1).astype(call.v_BxLxKxD.dtype), state)
