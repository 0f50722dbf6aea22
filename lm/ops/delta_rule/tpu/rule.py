"""The delta rule on TPUs: fused Pallas kernels, forward and backward.

A chunk of 128 tokens is one triangular system, which is inverted on chip (`inverse`); states stay there from chunk to
chunk. The backward pass keeps inputs, outputs, inverses and the state before each chunk, rounded as the products that
read them round them. Several heads are computed side by side: with one head alone each product would wait for the
product before.

Where key channels have factors of their own, a chunk is computed by `channels`.

Static cycles per token and head are measured by `scripts.kernels.cycles`.
"""

from typing import cast

import jax
import jax.numpy as jnp

from lm.ops import platform
from lm.ops.delta_rule.tpu.backward import differentiate
from lm.ops.delta_rule.tpu.forward import compute
from lm.ops.delta_rule.tpu.plan import estimate_vmem, make_plan
from lm.ops.delta_rule.types import DeltaCall, DeltaResult
from lm.ops.tpu import by_head, by_token
from lm.ops.tpu.chunk_sizes import ChunkSizes, refuse
from lm.ops.tpu.chunk_walk import ChunkWalk, run_walk
from lm.ops.tpu.chunks import CHUNK, WalkedTokens
from lm.ops.tpu.decay import LogSums, arrange_log_decay, block_sums

WALK = ChunkWalk(
    'delta_rule',
    compute,
    differentiate,
    forward_rows=lambda plan: 4 + 3 * plan.groups,
    backward_rows=lambda plan: 9 + 7 * plan.groups,
)


def delta_rule(call: DeltaCall) -> DeltaResult:
    """Computes the call, which `unsupported` must not refuse."""
    return platform.per_device(_compute, (True,))(call.fill_state())


def unsupported(call: DeltaCall) -> str | None:
    """Returns why the kernels cannot compute this call, or None."""
    if platform.target_platform() != 'tpu':
        return 'needs a TPU'
    return refuse(call, estimate_vmem(call))


def _compute(call: DeltaCall) -> DeltaResult:
    heads, sizes, plan = call.k_BxLxKxE.shape[2], ChunkSizes.measure(call), make_plan(call)
    padded = plan.steps * CHUNK
    # Zero tokens after the last one do not change the state.
    q, k, v = (by_token(a, padded, a.shape[2]) for a in (call.q_BxLxHxE, call.k_BxLxKxE, call.v_BxLxKxD))
    beta = arrange_log_decay(call.beta_BxLxK, padded, heads)
    c, rest = jnp.zeros_like(beta), None
    if plan.channels:
        c = by_token(cast(jax.Array, call.all_log_decay_BxLxKxE), padded, heads)
    elif call.log_decay_BxLxK is not None:
        c, rest = cast(LogSums, block_sums(arrange_log_decay(call.log_decay_BxLxK, padded, heads), CHUNK, v.dtype))
    tokens, rows = WalkedTokens(q, k, v, beta, c, rest), (sizes.key_rows, sizes.value_rows)
    o_MxDxL, state = run_walk(WALK, plan, tokens, call.first_state_BxKxExD, rows)
    return DeltaResult(by_head(o_MxDxL, call.q_BxLxHxE, call.v_BxLxKxD.shape[-1]), state)
