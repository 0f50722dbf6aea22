"""How the kernels of the delta rule cut their arrays."""

import dataclasses
from typing import NamedTuple

import jax

from lm.ops import platform
from lm.ops.delta_rule.types import DeltaCall
from lm.ops.tpu import LANES
from lm.ops.tpu.chunk_sizes import ChunkSizes, cut
from lm.ops.tpu.chunks import ChunkPlan
from lm.ops.tpu.decay import LogSums


class DeltaTokens(NamedTuple):
    """Arrays of L tokens that lie feature by token: N key heads of all sequences, G queries of each.

    Attributes:
        q_MxExL: queries of N G heads.
        k_NxExL: keys.
        v_NxDxL: values.
        beta_Nx1xL: float32.
        c_NxRxL: the running sums of log factors in each chunk, R = 1, float32. In a plan with `channels` they are the
            log factors themselves, R = E.
        rest_Nx1xL: the rest that the rounding of the sums has left; None in a plan with `channels`, and in bfloat16.
    """

    q_MxExL: jax.Array
    k_NxExL: jax.Array
    v_NxDxL: jax.Array
    beta_Nx1xL: jax.Array
    c_NxRxL: jax.Array
    rest_Nx1xL: jax.Array | None = None

    def sums(self, head: int) -> LogSums:
        """Returns the running sums of a head as rows; inside a kernel, in a plan without `channels`."""
        return LogSums(self.c_NxRxL[head], None if self.rest_Nx1xL is None else self.rest_Nx1xL[head])


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaSizes(ChunkSizes):
    """The sizes of a call that decide how the kernels cut it.

    Attributes:
        query_length: the `query_length` of the call.
        channels: whether key channels have factors of their own.
    """

    query_length: float | None
    channels: bool

    @classmethod
    def of_call(cls, call: DeltaCall) -> 'DeltaSizes':
        channels = call.channel_log_decay_BxLxKxE is not None
        return cls.measure(call, query_length=call.query_length, channels=channels)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaPlan(ChunkPlan):
    """The part of each array that a grid step sees.

    Attributes:
        query_length: queries are scaled to this length and keys to length 1; None: neither is scaled.
        channels: whether key channels have factors of their own.
        staggered: whether the packs of a backward step begin one after the other, in a plan with `channels`.
    """

    query_length: float | None
    channels: bool
    staggered: bool

    @property
    def key_length(self) -> float | None:
        return self.query_length and 1.0


def make_plan(sizes: DeltaSizes) -> DeltaPlan:
    """Plans the kernels of a call."""
    # Pays where matrix units are the busier ones, on v5e and v5p. On v4 and v6e numbers that live longer cost more.
    staggered = platform.matrix_side() == LANES and not platform.rotates_by_steps()
    options = {'query_length': sizes.query_length, 'channels': sizes.channels, 'staggered': staggered}
    return cut(DeltaPlan, sizes, estimate_vmem(sizes), pack=sizes.channels, **options)


def estimate_vmem(sizes: DeltaSizes) -> int:
    """Estimates the bytes of VMEM that a head of the backward kernel, the larger one, takes."""
    return sizes.estimate_vmem(2 + 4 * sizes.itemsize + 3 * sizes.groups, sizes.channels)
