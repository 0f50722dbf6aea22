"""Softmax attention on TPUs: JAX's splash attention kernels, forward and backward."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from lm.ops import platform
from lm.ops.chips import limits_of
from lm.ops.exact_attention.masks import beyond_causal
from lm.ops.exact_attention.tpu.plan import block_size
from lm.ops.residuals import RESIDUAL_NAME
from lm.ops.tpu import LANES, MIB

FUSED_SHARE = 1 / 16
"""The fused backward kernel writes the gradient of the queries once a block of keys, to be added up: quadratic memory.
It forms 5 products where two kernels form 7, and is taken while these gradients take at most this share of a
device's memory; not with a window, where most of them are zeros."""
WIDE = 256
"""Bytes of a head, above which long blocks do not fit on chip: those of keys, and on small chips those of queries."""


def softmax_attention(
    q_BxLxHxD,
    k_BxLxKxD,
    v_BxLxKxD,
    *,
    scale,
    window=None,
    causal=True,
    k_start=0,
    starts=None,
    block=None,
    interpret=False,
    **rest,
) -> jax.Array:
    """Arguments as in `lm.ops.exact_attention.softmax_attention`; calls that `unsupported` refuses are wrong here.

    `interpret` runs the kernels on any platform, slowly.
    """
    reach, ids_BxL = 0, starts
    if _is_part(q_BxLxHxD, k_BxLxKxD, window):  # a whole window, whose first queries nobody asks for
        reach = window - 1
        ids_BxL = _ids_of_part(*q_BxLxHxD.shape[:2], reach, k_start, starts)
        q_BxLxHxD = jnp.pad(q_BxLxHxD, ((0, 0), (reach, 0), (0, 0), (0, 0)))
    length, heads = q_BxLxHxD.shape[1:3]
    block, padded, key_block = blocks(length, q_BxLxHxD.shape[-1] * q_BxLxHxD.dtype.itemsize, block, window)

    def attend(q_BxLxHxD, k_BxLxKxD, v_BxLxKxD, ids_BxL):
        # Zero keys after the last token are in every query's future.
        q_BxHxLxD, k_BxKxLxD, v_BxKxLxD = (
            jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, padded - length), (0, 0)))
            for x in (q_BxLxHxD * jnp.asarray(scale, q_BxLxHxD.dtype), k_BxLxKxD, v_BxLxKxD)
        )
        segments = None
        if ids_BxL is not None:  # tokens of one document have one start; that of the padding is past them all
            ids_BxL = jnp.pad(ids_BxL, ((0, 0), (0, padded - length)), constant_values=length)
            segments = _segments(ids_BxL)
        fused = window is None and is_fused(q_BxHxLxD, key_block)
        kernel = jax.vmap(_kernel(heads, padded, window, block, key_block, fused, interpret))
        o_BxHxLxD = kernel(q_BxHxLxD, k_BxKxLxD, v_BxKxLxD, segments)
        return o_BxHxLxD[:, :, :length].swapaxes(1, 2)

    o_BxLxHxD = platform.per_device(attend, split=(True,) * 4)(q_BxLxHxD, k_BxLxKxD, v_BxLxKxD, ids_BxL)
    return o_BxLxHxD[:, reach:]


def unsupported(q, k, v, *, block=None, **options) -> str | None:
    """Why splash attention cannot compute this call, or None."""
    if platform.target_platform() != 'tpu':
        return 'needs a TPU'
    parts = platform.sequence_shards() if _is_part(q, k, options.get('window')) else 1
    if reason := beyond_causal(q, k, parts=parts, **options):
        return reason
    if block is not None and block % LANES:
        return f'takes blocks that are multiples of {LANES}, not {block}'
    return platform.uneven_batch(q.shape[0])


def blocks(length: int, width: int, block: int | None = None, window: int | None = None) -> tuple[int, int, int]:
    """(tokens a block of queries, the length in whole blocks, keys a block) for heads of `width` bytes.

    Static cycles on v5e and v6e: wide blocks of keys pay off where the waste on the diagonal is small, and a window
    wants short ones, since the two or more blocks that it touches are computed whole.
    """
    most = WIDE if platform.vmem()[0] < 32 * MIB else 2 * WIDE
    longest = 512 if width > most else 1024
    if window is not None:
        longest = 256 if window <= 512 else 512
    block = block or block_size(length, longest)
    padded = -(-length // block) * block
    pays = window is None and padded % (2 * block) == 0 and padded >= 16 * block
    return block, padded, 2 * block if pays and width <= WIDE else block


def is_fused(q_BxHxLxD: jax.Array, key_block: int) -> bool:
    """Whether one kernel forms all gradients of these queries, of one device, and of their keys and values."""
    chip = limits_of(platform.device_kind())
    memory = ((chip and chip.hbm_gib) or 16) * 2**30
    written = q_BxHxLxD.size * q_BxHxLxD.dtype.itemsize * (q_BxHxLxD.shape[2] // key_block)
    return written <= FUSED_SHARE * memory


def _is_part(q: jax.Array, k: jax.Array, window: int | None) -> bool:
    """Whether these are the queries of a part of a window, and the keys that they reach back to before their own; with
    windows longer than a part, keys are those of all parts, which may be as many."""
    reaches = window is not None and window - 1 <= q.shape[1]
    return reaches and platform.sequence_shards() > 1 and k.shape[1] == q.shape[1] + window - 1


def _ids_of_part(batch: int, length: int, reach: int, k_start, starts_BxL) -> jax.Array:
    """Which of the `reach` tokens before a part, and of its own, see each other: those with one number.

    What came before belongs to the first document of the part, from where that begins.
    """
    if starts_BxL is None:
        starts_BxL = jnp.broadcast_to(k_start, (batch, length))
    first_Bx1 = starts_BxL[:, :1]
    before_BxR = jnp.where(jnp.arange(reach) >= jnp.maximum(first_Bx1, k_start), first_Bx1, reach + length)
    return jnp.concatenate([before_BxR, starts_BxL], axis=1).astype(jnp.int32)


def _segments(ids_BxL: jax.Array) -> Any:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    return splash.SegmentIds(ids_BxL, ids_BxL)


def _kernel(heads: int, length: int, window: int | None, block: int, block_kv: int, fused: bool, interpret: bool):
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    shape = (length, length)
    if window is None:
        mask = _remembering(splash.CausalMask)(shape)
    else:
        mask = _remembering(splash.LocalMask)(shape, (window - 1, 0), 0)
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block_kv,
        block_kv_compute=512 if block % 512 == 0 else block,
        block_q_dkv=block,
        block_kv_dkv=block_kv,
        block_kv_dkv_compute=block,
        block_q_dq=None if fused else block,
        block_kv_dq=None if fused else block_kv,
        use_fused_bwd_kernel=fused,
    )
    return splash.make_splash_mha(
        splash.MultiHeadMask([mask] * heads),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=RESIDUAL_NAME,
        interpret=interpret,
    )


@functools.cache
def _remembering(mask: type) -> type:
    """A mask that computes one block for each distance from the diagonal.

    Splash attention looks at every block while it is traced; computing them all takes 40 s at 131,072 tokens.
    """

    class Remembering(mask):
        def __getitem__(self, index):
            (q, k), seen = index, self.__dict__.setdefault('seen', {})
            q_size, k_size, distance = q.stop - q.start, k.stop - k.start, q.start - k.start
            key = q_size, k_size, distance
            if key not in seen:
                q_start, k_start = max(distance, 0), max(-distance, 0)
                seen[key] = super().__getitem__((slice(q_start, q_start + q_size), slice(k_start, k_start + k_size)))
            return seen[key]

    return Remembering
