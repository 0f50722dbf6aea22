"""How the kernels of the delta rule cut their arrays."""

import dataclasses
from typing import NamedTuple

import jax

from lm.ops import platform
from lm.ops.delta_rule.types import DeltaCall
from lm.ops.tpu import padded_rows
from lm.ops.tpu.chunks import CHUNK, ChunkPlan, count_heads, count_packed
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


@dataclasses.dataclass(frozen=True)
class DeltaSizes:
    """The sizes of a call that decide how the kernels cut it.

    Attributes:
        heads: key heads of all sequences.
        groups: queries per key head.
        length: tokens.
        key_rows: rows of keys, padded.
        value_rows: rows of values, padded.
        itemsize: bytes of a number.
        query_length: the `query_length` of the call.
        channels: whether key channels have factors of their own.
    """

    heads: int
    groups: int
    length: int
    key_rows: int
    value_rows: int
    itemsize: int
    query_length: float | None
    channels: bool

    @classmethod
    def of_call(cls, call: DeltaCall) -> 'DeltaSizes':
        batch, length, heads, size = call.k_BxLxKxE.shape
        rows, value_rows = padded_rows(size), padded_rows(call.v_BxLxKxD.shape[-1])
        itemsize = call.v_BxLxKxD.dtype.itemsize
        channels = call.channel_log_decay_BxLxKxE is not None
        return cls(batch * heads, call.groups, length, rows, value_rows, itemsize, call.query_length, channels)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaPlan(ChunkPlan):
    """The part of each array that a grid step sees.

    Attributes:
        query_length: queries are scaled to this length and keys to length 1; None: neither is scaled.
        channels: whether key channels have factors of their own.
    """

    query_length: float | None
    channels: bool

    @property
    def key_length(self) -> float | None:
        return self.query_length and 1.0


def make_plan(sizes: DeltaSizes) -> DeltaPlan:
    """Plans the kernels of a call: as many heads per step as fit and divide the heads of the call."""
    available, limit = platform.vmem()
    heads = count_heads(sizes.heads, available // estimate_vmem(sizes))
    return DeltaPlan(
        heads=heads,
        groups=sizes.groups,
        steps=-(-sizes.length // CHUNK),
        query_length=sizes.query_length,
        channels=sizes.channels,
        vmem_limit_bytes=limit,
        pack=count_packed(heads, sizes.key_rows) if sizes.channels else 1,
    )


def estimate_vmem(sizes: DeltaSizes) -> int:
    """Estimates the bytes of VMEM that a head of the backward kernel, the larger one, takes."""
    groups, size, value_size, itemsize = sizes.groups, sizes.key_rows, sizes.value_rows, sizes.itemsize
    blocks = 2 * itemsize * CHUNK * ((1 + groups) * (2 * size + 2 * value_size)) + 2 * itemsize * size * value_size
    states = 4 * 5 * size * value_size
    pairs = (2 + 4 * itemsize + 3 * groups) * 4 * CHUNK**2
    # Per channel: the logs and their gradients, and the levels with their factors and gradients.
    levels = 4 * size * CHUNK * (4 + 3 * (CHUNK.bit_length() - 1)) if sizes.channels else 0
    return blocks + states + pairs + levels
