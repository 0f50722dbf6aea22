"""The sizes of a call that decide how kernels which walk over chunks cut it, and which calls they refuse."""

import dataclasses
from typing import Any, TypeVar

from lm.ops import platform
from lm.ops.tpu import padded_rows
from lm.ops.tpu.chunks import CHUNK, ChunkPlan, count_heads, count_packed

Sizes = TypeVar('Sizes', bound='ChunkSizes')
Plan = TypeVar('Plan', bound=ChunkPlan)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkSizes:
    """The sizes of a call.

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
    def measure(cls: type[Sizes], call: Any, **options: Any) -> Sizes:
        """Returns the sizes of a call with `q_BxLxHxE`, `k_BxLxKxE` and `v_BxLxKxD`, and other attributes as given."""
        batch, length, heads, size = call.k_BxLxKxE.shape
        return cls(
            heads=batch * heads,
            groups=call.q_BxLxHxE.shape[2] // heads,
            length=length,
            key_rows=padded_rows(size),
            value_rows=padded_rows(call.v_BxLxKxD.shape[-1]),
            itemsize=call.v_BxLxKxD.dtype.itemsize,
            **options,
        )

    def estimate_vmem(self, pairs: int, channels: bool) -> int:
        """Estimates the bytes of VMEM that a head of the backward kernel, the larger one, takes.

        Args:
            pairs: float32 numbers per pair of tokens.
            channels: whether key channels have factors of their own.
        """
        size, value_size = self.key_rows, self.value_rows
        blocks = 2 * self.itemsize * (CHUNK * (1 + self.groups) * 2 * (size + value_size) + size * value_size)
        states = 4 * 5 * size * value_size
        # Per channel: the logs and their gradients, and the levels with their factors and gradients.
        levels = 4 * size * CHUNK * (4 + 3 * (CHUNK.bit_length() - 1)) if channels else 0
        return blocks + states + pairs * 4 * CHUNK**2 + levels


def cut(kind: type[Plan], sizes: ChunkSizes, bytes_of_head: int, pack: bool, **options: object) -> Plan:
    """Plans the kernels of a call: as many heads per step as fit and divide the heads of the call.

    Args:
        kind: the class of the plan.
        sizes: the sizes of the call.
        bytes_of_head: bytes of VMEM that a head takes.
        pack: whether the states of heads lie side by side on the lanes, as many as fit.
        options: the other attributes of the plan.
    """
    available, limit = platform.vmem()
    heads = count_heads(sizes.heads, available // bytes_of_head)
    return kind(
        heads=heads,
        groups=sizes.groups,
        steps=-(-sizes.length // CHUNK),
        vmem_limit_bytes=limit,
        pack=count_packed(heads, sizes.key_rows) if pack else 1,
        **options,
    )


def refuse(call: Any, bytes_of_head: int) -> str | None:
    """Returns why no kernel can compute a call whose heads take so many bytes of VMEM; or None."""
    q, k, v = call.q_BxLxHxE, call.k_BxLxKxE, call.v_BxLxKxD
    if reason := platform.mixed_types(q, k, v):
        return reason
    if bytes_of_head > platform.vmem()[0]:
        return f'would not fit its VMEM with heads of {q.shape[-1]} and {v.shape[-1]}'
    return platform.uneven_batch(q.shape[0])
