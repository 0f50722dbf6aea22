"""How the kernels with a factor per key channel cut their arrays."""

import dataclasses
from typing import NamedTuple

import jax

from lm.ops import platform
from lm.ops.linear_attention.types import LinearCall
from lm.ops.tpu import padded_rows
from lm.ops.tpu.chunks import CHUNK, ChunkPlan, count_heads, count_packed


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


@dataclasses.dataclass(frozen=True)
class ChannelSizes:
    """The sizes of a call that decide how the kernels cut it.

    Attributes:
        heads: key heads of all sequences.
        groups: queries per key head.
        length: tokens.
        key_rows: rows of keys, padded.
        value_rows: rows of values, padded.
        itemsize: bytes of a number.
    """

    heads: int
    groups: int
    length: int
    key_rows: int
    value_rows: int
    itemsize: int

    @classmethod
    def of_call(cls, call: LinearCall) -> 'ChannelSizes':
        batch, length, heads, size = call.k_BxLxKxE.shape
        groups = call.q_BxLxHxE.shape[2] // heads
        rows, value_rows = padded_rows(size), padded_rows(call.v_BxLxKxD.shape[-1])
        return cls(batch * heads, groups, length, rows, value_rows, call.v_BxLxKxD.dtype.itemsize)


def make_plan(sizes: ChannelSizes) -> ChunkPlan:
    """Plans the kernels of a call: as many heads per step as fit and divide the heads of the call."""
    available, limit = platform.vmem()
    heads = count_heads(sizes.heads, available // estimate_vmem(sizes))
    return ChunkPlan(
        heads=heads,
        groups=sizes.groups,
        steps=-(-sizes.length // CHUNK),
        vmem_limit_bytes=limit,
        pack=count_packed(heads, sizes.key_rows),
    )


def estimate_vmem(sizes: ChannelSizes) -> int:
    """Estimates the bytes of VMEM that a head of the backward kernel, the larger one, takes."""
    groups, size, value_size, itemsize = sizes.groups, sizes.key_rows, sizes.value_rows, sizes.itemsize
    blocks = 2 * itemsize * CHUNK * ((1 + groups) * (2 * size + 2 * value_size)) + 2 * itemsize * size * value_size
    states = 4 * 5 * size * value_size
    pairs = (itemsize + 3 * groups) * 4 * CHUNK**2
    # The logs and their gradients, and the levels with their factors and gradients.
    levels = 4 * size * CHUNK * (4 + 3 * (CHUNK.bit_length() - 1))
    return blocks + states + pairs + levels
