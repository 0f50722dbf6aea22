"""The delta rule."""

import jax
import jax.numpy as jnp

from lm.attention import HeadDims
from lm.cost_model.kernel_cases.base import Case, KernelCall, Steps
from lm.ops.delta_rule import delta_rule
from lm.ops.delta_rule.tpu.plan import CHUNK, plan_for


def cases() -> dict[str, Case]:
    return dict(delta=delta_call)


def delta_call(dims: HeadDims, length: int) -> KernelCall:
    """Returns a call with decay, in bfloat16."""

    def function(q, k, v, beta, log_decay):
        return delta_rule(q, k, v, beta, log_decay, query_length=dims.head_dim**-0.5, implementation='pallas_tpu')

    q, k = (jax.ShapeDtypeStruct((1, length, n, dims.head_dim), jnp.bfloat16) for n in (dims.n_heads, dims.n_kv_heads))
    gate = jax.ShapeDtypeStruct(k.shape[:3], jnp.float32)
    groups, size = dims.n_heads // dims.n_kv_heads, dims.head_dim

    def steps(value_size: int) -> Steps:
        plan = plan_for(dims.n_kv_heads, groups, length, size, value_size, k.dtype.itemsize)
        return {(name, f'delta_rule_{name}'): plan.heads * groups * CHUNK for name in ('forward', 'backward')}

    # A part of a window also computes its effect on the state, which has as many columns as a key has numbers.
    return KernelCall(function, (q, k, k, gate, gate), steps(size), part_steps=steps(2 * size))
