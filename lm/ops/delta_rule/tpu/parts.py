"""The kernels over windows that are split over devices: they walk a part as `lm.ops.delta_rule.parts` has it."""

import jax

from lm.ops.delta_rule.parts import extended, of_part
from lm.ops.delta_rule.tpu import rule


def delta_rule(q_BxLxHxE, k_BxLxKxE, v_BxLxKxD, beta_BxLxK, log_decay_BxLxK, query_length=None) -> jax.Array:
    """The outputs [B, L, H, D] of this part; arguments as in `lm.ops.delta_rule`."""
    return of_part(rule.delta_rule, q_BxLxHxE, k_BxLxKxE, v_BxLxKxD, beta_BxLxK, log_decay_BxLxK, query_length)


def unsupported(q, k, v, beta, log_decay) -> str | None:
    """Why the kernels cannot compute this call, or None."""
    columns, start = jax.eval_shape(extended, k, v)
    return rule.unsupported(q, k, columns, beta, log_decay, start)
