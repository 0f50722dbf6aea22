"""Linear attention with a factor per key channel on TPUs: fused Pallas kernels, forward and backward.

A grid step computes a chunk of 128 tokens; states stay on chip from chunk to chunk. The backward pass keeps inputs and
the state before each chunk. Several heads are computed side by side: with one head alone each product would wait for
the product before.
"""

import jax

from lm.ops import platform
from lm.ops.linear_attention.channels import attend_part, attend_whole
from lm.ops.linear_attention.tpu.channels.backward import differentiate
from lm.ops.linear_attention.tpu.channels.forward import compute
from lm.ops.linear_attention.types import LinearCall, LinearResult
from lm.ops.tpu import by_head, by_token, chunk_sizes
from lm.ops.tpu.chunk_sizes import ChunkSizes, cut
from lm.ops.tpu.chunk_walk import ChunkWalk, run_walk
from lm.ops.tpu.chunks import CHUNK, ChunkPlan, WalkedTokens

WALK = ChunkWalk(
    'channel_attention',
    compute,
    differentiate,
    forward_rows=lambda plan: 1 + 9 * plan.groups,
    backward_rows=lambda plan: 2 + 26 * plan.groups,
)


def linear_attention(call: LinearCall) -> LinearResult:
    """Computes a call, which `refuse` must not refuse."""
    return attend_whole(_attend, call)


def linear_attention_on_part(call: LinearCall) -> LinearResult:
    """Computes the outputs of one part of a window that is split over devices (`lm.ops.sequence`)."""
    return attend_part(_attend, call)


def refuse(call: LinearCall) -> str | None:
    """Returns why the kernels cannot compute this call, whose channels have factors of their own; or None."""
    return chunk_sizes.refuse(call, estimate_vmem(ChunkSizes.measure(call)))


def make_plan(sizes: ChunkSizes) -> ChunkPlan:
    """Plans the kernels of a call."""
    return cut(ChunkPlan, sizes, estimate_vmem(sizes), pack=True)


def estimate_vmem(sizes: ChunkSizes) -> int:
    """Estimates the bytes of VMEM that a head of the backward kernel, the larger one, takes."""
    return sizes.estimate_vmem(sizes.itemsize + 3 * sizes.groups, channels=True)


def _attend(call: LinearCall, state_BxKxExD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes the outputs of a call from the state before its first token."""
    return platform.per_device(_compute, (True, True))(call, state_BxKxExD)


def _compute(call: LinearCall, state_BxKxExD: jax.Array) -> tuple[jax.Array, jax.Array]:
    sizes = ChunkSizes.measure(call)
    plan = make_plan(sizes)
    arrays = (call.q_BxLxHxE, call.k_BxLxKxE, call.v_BxLxKxD, call.all_log_decay_BxLxKxE)
    # Zero tokens after the last one do not change the state.
    q, k, v, log = (by_token(a, plan.steps * CHUNK, a.shape[2]) for a in arrays)
    tokens = WalkedTokens(q, k, v, None, log)
    o_MxDxL, state = run_walk(WALK, plan, tokens, state_BxKxExD, (sizes.key_rows, sizes.value_rows))
    return by_head(o_MxDxL, call.q_BxLxHxE, call.v_BxLxKxD.shape[-1]), state
