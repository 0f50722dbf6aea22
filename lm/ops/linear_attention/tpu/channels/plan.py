"""How the kernels with a factor per key channel cut their arrays."""

from typing import NamedTuple

import jax

from lm.ops.tpu.chunk_sizes import ChunkSizes, cut
from lm.ops.tpu.chunks import ChunkPlan


class ChannelTokens(NamedTuple):
    """Arrays of L tokens that lie feature by token: N key heads of all sequences, G queries of each.

    Attributes:
        q_MxExL: queries of N G heads.
        k_NxExL: keys.
        v_NxDxL: values.
        log_NxExL: the logs of the factors, float32.
    """

    q_MxExL: jax.Array
    k_NxExL: jax.Array
    v_NxDxL: jax.Array
    log_NxExL: jax.Array


def make_plan(sizes: ChunkSizes) -> ChunkPlan:
    """Plans the kernels of a call."""
    return cut(ChunkPlan, sizes, estimate_vmem(sizes), pack=True)


def estimate_vmem(sizes: ChunkSizes) -> int:
    """Estimates the bytes of VMEM that a head of the backward kernel, the larger one, takes."""
    return sizes.estimate_vmem(sizes.itemsize + 3 * sizes.groups, channels=True)
