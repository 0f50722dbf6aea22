"""How the kernels of `flash` cut their work, and which calls they compute."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from lm.ops import platform
from lm.ops.exact_attention.tpu.pairs import Window, number_diagonals
from lm.ops.exact_attention.tpu.weight_rule import WeightRule
from lm.ops.exact_attention.types import ExactCall, SoftmaxCall
from lm.ops.tpu import LANES, MIB, padded_rows

MAX_BLOCK = 1024
MAX_PAIRS = 2**17
"""Pairs of blocks whose table (4 bytes each) fits the scalar memory."""


@dataclasses.dataclass(frozen=True)
class FlashPlan:
    """The rule that the kernels compute, and how they cut it into steps.

    Attributes:
        rule: how scores become weights.
        block: tokens per block, of queries and of keys.
        piece: queries, and keys, at a time in the forward kernel.
        leveled: keys of these queries that form a group in it: they have one level.
        early: by how many groups it forms scores before it needs them.
        forward_diagonal: queries at a time in it, in a block on the diagonal.
        tile: keys at a time in the backward kernel.
        backward_diagonal: queries at a time in it, in a block on the diagonal.
        chunk: blocks of queries whose gradient stays in VMEM during one backward sweep over the keys.
        group: query heads that share a key head.
        parts: the parts of the window. The queries are one part, the keys belong to all.
        documents: query heads of each row of the batch, which has documents; None: a window is one text.
        window: the keys that a query sees; None: all before it.
        before: keys before the first query, in a window whose earlier tokens another device has.
        sinks: whether each head has a sink.
        fills_products: whether products of the forward kernel also multiply scores by the factor of the rule, and sum
            weights. They fill rows of large matrix units that heads leave empty, and vector units do less.
        vmem_limit_bytes: memory that the compiler may use; None: its default.
    """

    rule: WeightRule
    block: int
    piece: int
    leveled: int
    early: int
    forward_diagonal: int
    tile: int
    backward_diagonal: int
    chunk: int
    group: int
    parts: int = 1
    documents: int | None = None
    window: Window | None = None
    before: int = 0
    sinks: bool = False
    fills_products: bool = False
    vmem_limit_bytes: int | None = None

    @property
    def ahead(self) -> int:
        """Blocks of keys before the first query."""
        return -(-self.before // self.block)

    def diagonals(self, blocks: int) -> np.ndarray:
        """Returns `Walk.diagonal_PxI` of so many blocks of queries."""
        return number_diagonals(blocks, self.parts) + self.ahead


def plan_for(rule: WeightRule, call: ExactCall) -> FlashPlan:
    """Returns how the kernels compute a call; the block does not change the result."""
    length, heads, size = call.q_BxLxHxD.shape[1:]
    width, parts = padded_rows(size) * call.q_BxLxHxD.dtype.itemsize, _parts(call)
    small = platform.vmem()[0] < 32 * MIB
    block = _block(length, parts, call.block, 512 if small and width > 256 else MAX_BLOCK)
    # Static cycles on v5e and v6e: long tiles pay, and so does less waste above the diagonal. Where levels are kept,
    # pieces of the size of a matrix unit wait for them one after the other.
    long, short = (next(side for side in (most, 256, LANES) if block % side == 0) for most in (512, 256))
    piece, leveled, early = LANES if small else block, block, 2
    large = platform.matrix_side() > LANES
    # On v5e and v5p matrix units limit the kernel.
    leaves_rows = (small or large) and 2 * padded_rows(size) <= platform.matrix_side()
    fills_products = leaves_rows and rule.keeps_levels and call.q_BxLxHxD.dtype == jnp.bfloat16
    if rule.keeps_levels:
        piece, leveled = short if large else LANES, short
        early = 6 if fills_products or large else 4
    gradient = (4 if small else 16) * MIB
    reach = reach_of_part(call)
    window = None if call.window is None or call.window >= length + (reach or 0) else Window(call.window, block)
    # The gradients of queries whose windows begin at one block of keys are few: they wait in VMEM for any length.
    blocks = -(-length // block)
    return FlashPlan(
        rule=rule,
        block=block,
        piece=piece,
        leveled=leveled,
        early=early,
        forward_diagonal=min(piece, long),
        tile=short if small else block,
        backward_diagonal=short,
        chunk=max(1, gradient // (2 * width * block)) if window is None else blocks,
        group=heads // call.k_BxMxKxD.shape[2],
        parts=parts,
        documents=None if call.starts_BxL is None and reach is None else heads,
        window=window,
        before=reach or 0,
        sinks=isinstance(call, SoftmaxCall) and call.sinks_H is not None,
        fills_products=fills_products,
        vmem_limit_bytes=None if small else 56 * MIB,
    )


def unsupported(call: ExactCall) -> str | None:
    """Returns why the kernels cannot compute this call, or None."""
    q, k, v, block = call.q_BxLxHxD, call.k_BxMxKxD, call.v_BxMxKxD, call.block
    if platform.target_platform() != 'tpu':
        return 'needs a TPU'
    parts, reach = _parts(call), reach_of_part(call)
    if reason := call.beyond_causal(parts if reach is None else platform.sequence_shards()):
        return reason
    if parts > 1 and call.window is not None:
        return f'takes no window of {call.window} tokens over parts of {q.shape[1]}'
    if block is not None and (block % LANES or block > MAX_BLOCK):
        return f'takes blocks that are multiples of {LANES} up to {MAX_BLOCK}, not {block}'
    if reason := platform.mixed_types(q, k, v):
        return reason
    if max(q.shape[-1], v.shape[-1]) > LANES:
        return f'takes head sizes up to {LANES}, not {max(q.shape[-1], v.shape[-1])}'
    length = q.shape[1]
    if parts > 1 and length % (2 * LANES):
        return f'takes parts of a window that are multiples of {2 * LANES} tokens, not {length}'
    side = _block(length, parts, block, MAX_BLOCK)
    blocks, seen = -(-length // side), (parts * -(-length // side) + 1) / 2
    if call.window is not None:
        seen = min(seen, Window(call.window, side).back + 1)
    if blocks * seen > MAX_PAIRS:
        return f'takes fewer than {blocks} blocks of tokens'
    return platform.uneven_batch(q.shape[0])


def reach_of_part(call: ExactCall) -> int | None:
    """Returns how many keys the window reaches back to before a part of it, where the call has one; else None.

    With windows longer than a part, the keys belong to all parts, and may be as many.
    """
    if call.window is None or platform.sequence_shards() == 1:
        return None
    length, reach = call.q_BxLxHxD.shape[1], call.window - 1
    return reach if reach <= length and call.k_BxMxKxD.shape[1] == length + reach else None


def block_size(length: int, most: int = MAX_BLOCK) -> int:
    """Returns the block of at most `most` tokens that wastes least padding."""
    parts = -(-length // most)
    return -(-length // parts // LANES) * LANES


def _block(length: int, parts: int, requested: int | None, most: int) -> int:
    """Returns the tokens per block. The halves of a part of a window hold a whole number of blocks."""
    if parts == 1:
        return min(requested or block_size(length), most)
    return next(side for side in range(min(requested or most, most), 0, -LANES) if length // 2 % side == 0)


def _parts(call: ExactCall) -> int:
    """Returns the parts of the window, where the queries are one part and the keys belong to all; else 1."""
    parts = platform.sequence_shards() if reach_of_part(call) is None else 1
    return parts if call.k_BxMxKxD.shape[1] == parts * call.q_BxLxHxD.shape[1] else 1
