"""The delta rule on TPUs: fused Pallas kernels, forward and backward.

A chunk of 128 tokens is one triangular system, which is inverted on chip (`inverse`); states stay there from chunk to
chunk. Kept for the backward pass are inputs, outputs and the state before each chunk, rounded as the products that read
it round it. Several heads are computed side by side: of one alone each product would wait for the one before it.

Static cycles per token and head are measured by `lm.bench.kernels`.
"""

import functools

import jax
import jax.numpy as jnp

from lm.ops import platform
from lm.ops.delta_rule.tpu.backward import backward
from lm.ops.delta_rule.tpu.forward import forward
from lm.ops.delta_rule.tpu.plan import CHUNK, DeltaPlan, plan_for, vmem_estimate
from lm.ops.residuals import saved
from lm.ops.tpu import by_head, by_token, padded_rows
from lm.ops.tpu.decay import block_sums, of_heads


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
    arrays = (q_BxLxHxE, k_BxLxKxE, v_BxLxKxD, beta_BxLxK, log_decay_BxLxK, initial_state)
    run = functools.partial(_of_device, query_length)
    return platform.per_device(run, (True,) * len(arrays))(*arrays)


def unsupported(q_BxLxHxE, k_BxLxKxE, v_BxLxKxD, *rest) -> str | None:
    """Why the kernels cannot compute this call, or None."""
    if platform.target_platform() != 'tpu':
        return 'needs a TPU'
    dtypes = {x.dtype for x in (q_BxLxHxE, k_BxLxKxE, v_BxLxKxD)}
    if len(dtypes) > 1 or not dtypes <= {jnp.dtype('bfloat16'), jnp.dtype('float32')}:
        return f'takes arrays that are all bfloat16 or all float32, not {", ".join(sorted(map(str, dtypes)))}'
    groups, *sizes = _sizes(q_BxLxHxE, k_BxLxKxE, v_BxLxKxD)
    if vmem_estimate(groups, *sizes) > platform.vmem()[0]:
        return f'would not fit its VMEM with heads of {q_BxLxHxE.shape[-1]} and {v_BxLxKxD.shape[-1]}'
    return platform.uneven_batch(q_BxLxHxE.shape[0])


def _sizes(q, k, v):
    """Queries of a key head, rows of keys and values, padded; bytes of a number."""
    return q.shape[2] // k.shape[2], padded_rows(k.shape[-1]), padded_rows(v.shape[-1]), v.dtype.itemsize


def _of_device(query_length, q, k, v, beta, log_decay, state):
    batch, length, heads, size = k.shape
    value_size = v.shape[-1]
    groups, *sizes = _sizes(q, k, v)
    plan = plan_for(batch * heads, groups, length, *sizes, query_length)
    padded = plan.steps * CHUNK
    # Zero tokens after the last leave the state as it is.
    arrays = (by_token(a, padded, a.shape[2]) for a in (q, k, v))
    beta = of_heads(beta, padded, heads)
    c = jnp.zeros_like(beta) if log_decay is None else block_sums(of_heads(log_decay, padded, heads), CHUNK)
    rows, columns = (0, sizes[1] - value_size), (0, sizes[0] - size)
    before_NxDxE = jnp.pad(state.swapaxes(2, 3), ((0, 0), (0, 0), rows, columns)).reshape(batch * heads, *sizes[1::-1])
    o, after_NxDxE = _walk(plan, *arrays, beta, c, before_NxDxE)
    after_BxKxDxE = after_NxDxE.reshape(batch, heads, *after_NxDxE.shape[1:])
    return by_head(o, q, value_size), after_BxKxDxE[:, :, :value_size, :size].swapaxes(2, 3)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _walk(plan: DeltaPlan, q, k, v, beta, c, before):
    """Outputs and the states after the last token; arguments as in `forward`."""
    return tuple(forward(plan, False, q, k, v, beta, c, before))


def _walk_forward(plan, *inputs):
    o, after, states = forward(plan, True, *inputs)
    return (saved(o), after), (inputs[:-1], saved(states))


def _walk_backward(plan, residuals, cotangents):
    inputs, states = residuals
    return tuple(backward(plan, *inputs, states, *cotangents))


_walk.defvjp(_walk_forward, _walk_backward)
