"""The delta rule on TPUs: fused Pallas kernels, forward and backward.

A chunk of 128 tokens is one triangular system, which is inverted on chip (`inverse`); states stay there from chunk to
chunk. The backward pass keeps inputs, outputs and the state before each chunk, rounded as the products that read it
round it. Several heads are computed side by side: with one head alone each product would wait for the product before.

Where key channels have factors of their own, a chunk is computed by `channels`.

Static cycles per token and head are measured by `lm.bench.kernels`.
"""

import functools
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp

from lm.ops import platform
from lm.ops.delta_rule.tpu.backward import backward
from lm.ops.delta_rule.tpu.forward import forward
from lm.ops.delta_rule.tpu.plan import DeltaPlan, DeltaSizes, DeltaTokens, estimate_vmem, make_plan
from lm.ops.delta_rule.types import DeltaCall, DeltaResult
from lm.ops.residuals import save_residual
from lm.ops.tpu import by_head, by_token
from lm.ops.tpu.chunks import CHUNK
from lm.ops.tpu.decay import arrange_log_decay, block_sums


def delta_rule(call: DeltaCall) -> DeltaResult:
    """Computes the call, which `unsupported` must not refuse."""
    return platform.per_device(_compute, (True,))(call.fill_state())


def unsupported(call: DeltaCall) -> str | None:
    """Returns why the kernels cannot compute this call, or None."""
    q, k, v = call.q_BxLxHxE, call.k_BxLxKxE, call.v_BxLxKxD
    if platform.target_platform() != 'tpu':
        return 'needs a TPU'
    dtypes = {x.dtype for x in (q, k, v)}
    if len(dtypes) > 1 or not dtypes <= {jnp.dtype('bfloat16'), jnp.dtype('float32')}:
        return f'takes arrays that are all bfloat16 or all float32, not {", ".join(sorted(map(str, dtypes)))}'
    if estimate_vmem(DeltaSizes.of_call(call)) > platform.vmem()[0]:
        return f'would not fit its VMEM with heads of {q.shape[-1]} and {v.shape[-1]}'
    return platform.uneven_batch(q.shape[0])


def _compute(call: DeltaCall) -> DeltaResult:
    batch, _, heads, size = call.k_BxLxKxE.shape
    value_size, sizes = call.v_BxLxKxD.shape[-1], DeltaSizes.of_call(call)
    plan = make_plan(sizes)
    padded = plan.steps * CHUNK
    # Zero tokens after the last one do not change the state.
    q, k, v = (by_token(a, padded, a.shape[2]) for a in (call.q_BxLxHxE, call.k_BxLxKxE, call.v_BxLxKxD))
    beta = arrange_log_decay(call.beta_BxLxK, padded, heads)
    c = jnp.zeros_like(beta)
    if plan.channels:
        c = by_token(cast(jax.Array, call.all_log_decay_BxLxKxE), padded, heads)
    elif call.log_decay_BxLxK is not None:
        c = cast(jax.Array, block_sums(arrange_log_decay(call.log_decay_BxLxK, padded, heads), CHUNK))
    before_BxKxDxE = jnp.pad(
        call.first_state_BxKxExD.swapaxes(2, 3),
        ((0, 0), (0, 0), (0, sizes.value_rows - value_size), (0, sizes.key_rows - size)),
    )
    before_NxDxE = before_BxKxDxE.reshape(batch * heads, sizes.value_rows, sizes.key_rows)
    o, after_NxDxE = cast(WalkResult, _walk(plan, DeltaTokens(q, k, v, beta, c), plan.pack_states(before_NxDxE)))
    after_NxDxE = plan.unpack_states(after_NxDxE)
    after_BxKxDxE = after_NxDxE.reshape(batch, heads, *after_NxDxE.shape[1:])
    state = after_BxKxDxE[:, :, :value_size, :size].swapaxes(2, 3)
    return DeltaResult(by_head(o, call.q_BxLxHxE, value_size), state)


class WalkResult(NamedTuple):
    """Outputs, and the states after the last token."""

    o_MxDxL: jax.Array
    after_NxDxE: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _walk(plan: DeltaPlan, tokens: DeltaTokens, before_NxDxE: jax.Array) -> WalkResult:
    results = forward(plan, False, tokens, before_NxDxE)
    return WalkResult(results.o_MxDxL, results.after_NxDxE)


def _walk_forward(plan: DeltaPlan, tokens: DeltaTokens, before_NxDxE: jax.Array):
    o, after, states = forward(plan, True, tokens, before_NxDxE)
    return WalkResult(save_residual(o), after), (tokens, save_residual(cast(jax.Array, states)))


def _walk_backward(plan: DeltaPlan, residuals: tuple[DeltaTokens, jax.Array], cotangents: WalkResult):
    tokens, states = residuals
    gradients = backward(plan, tokens, states, cotangents.o_MxDxL, cotangents.after_NxDxE)
    return gradients.tokens, gradients.before_NxDxE


_walk.defvjp(_walk_forward, _walk_backward)
