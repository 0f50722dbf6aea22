"""Softmax attention on TPUs: JAX's splash attention kernels, forward and backward."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from lm.ops import platform
from lm.ops.chips import limits_of
from lm.ops.exact_attention.tpu.plan import block_size, reach_of_part
from lm.ops.exact_attention.types import SoftmaxCall
from lm.ops.residuals import RESIDUAL_NAME
from lm.ops.tpu import LANES, MIB

FUSED_SHARE = 1 / 16
"""The fused backward kernel writes the gradient of the queries once per block of keys, to be added up. That takes
quadratic memory. The kernel forms 5 products where two kernels form 7. It is used while these gradients take at most
this share of a device's memory. With a window most of them are zeros, so it is not used."""
WIDE = 256
"""Bytes of a head, above which long blocks of keys, and on small chips of queries, do not fit on chip."""


def softmax_attention(call: SoftmaxCall, *, interpret: bool = False) -> jax.Array:
    """Computes calls that `unsupported` does not refuse. `interpret` runs the kernels on any platform, slowly."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    q_BxLxHxD, ids_BxL, window = call.q_BxLxHxD, call.starts_BxL, call.window
    reach = reach_of_part(call)
    if reach is not None:  # a whole window, whose first queries nobody asks for
        ids_BxL = _ids_of_part(call, reach)
        q_BxLxHxD = jnp.pad(q_BxLxHxD, ((0, 0), (reach, 0), (0, 0), (0, 0)))
    length, heads = q_BxLxHxD.shape[1:3]
    side, padded, key_side = blocks(length, q_BxLxHxD.shape[-1] * q_BxLxHxD.dtype.itemsize, call.block, window)

    def attend(q_BxLxHxD, k_BxLxKxD, v_BxLxKxD, ids_BxL):
        def by_head(x_BxLxHxD: jax.Array) -> jax.Array:
            # Zero keys after the last token are in every query's future.
            return jnp.pad(x_BxLxHxD.swapaxes(1, 2), ((0, 0), (0, 0), (0, padded - length), (0, 0)))

        scaled = (q_BxLxHxD * jnp.asarray(call.scale, q_BxLxHxD.dtype), k_BxLxKxD, v_BxLxKxD)
        q_BxHxLxD, k_BxKxLxD, v_BxKxLxD = map(by_head, scaled)
        segments = None
        if ids_BxL is not None:  # tokens of one document have one start; the padding has a start past them all
            ids_BxL = jnp.pad(ids_BxL, ((0, 0), (0, padded - length)), constant_values=length)
            segments = splash.SegmentIds(ids_BxL, ids_BxL)
        fused = window is None and is_fused(q_BxHxLxD, key_side)
        kernel = jax.vmap(_kernel(heads, padded, side, key_side, window, fused, interpret, call.score_cap))
        o_BxHxLxD = kernel(q_BxHxLxD, k_BxKxLxD, v_BxKxLxD, segments)
        return o_BxHxLxD[:, :, :length].swapaxes(1, 2)

    run = platform.per_device(attend, split=(True,) * 4)
    o_BxLxHxD = run(q_BxLxHxD, call.k_BxMxKxD, call.v_BxMxKxD, ids_BxL)
    return o_BxLxHxD[:, reach or 0 :]


def unsupported(call: SoftmaxCall) -> str | None:
    """Returns why splash attention cannot compute this call, or None."""
    if platform.target_platform() != 'tpu':
        return 'needs a TPU'
    parts = 1 if reach_of_part(call) is None else platform.sequence_shards()
    if reason := call.beyond_causal(parts):
        return reason
    if call.sinks_H is not None:
        return 'rounds the gradients of sinks (jax#40128)'
    if call.block is not None and call.block % LANES:
        return f'takes blocks that are multiples of {LANES}, not {call.block}'
    return platform.uneven_batch(call.q_BxLxHxD.shape[0])


def blocks(length: int, width: int, block: int | None = None, window: int | None = None) -> tuple[int, int, int]:
    """Returns queries per block, the length in whole blocks, and keys per block, for heads of `width` bytes.

    Static cycles on v5e and v6e: wide blocks of keys pay off where the waste on the diagonal is small. A window wants
    short ones, since the two or more blocks that it touches are computed whole.
    """
    most = WIDE if platform.vmem()[0] < 32 * MIB else 2 * WIDE
    longest = 512 if width > most else 1024
    if window is not None:
        longest = 256 if window <= 512 else 512
    block = block or block_size(length, longest)
    padded = -(-length // block) * block
    pays = window is None and padded % (2 * block) == 0 and padded >= 16 * block
    return block, padded, 2 * block if pays and width <= WIDE else block


def is_fused(q_BxHxLxD: jax.Array | jax.ShapeDtypeStruct, key_block: int) -> bool:
    """Returns whether one kernel forms all gradients of these queries, of one device, and of their keys and values."""
    chip = limits_of(platform.device_kind())
    memory = ((chip and chip.hbm_gib) or 16) * 2**30
    written = q_BxHxLxD.size * q_BxHxLxD.dtype.itemsize * (q_BxHxLxD.shape[2] // key_block)
    return written <= FUSED_SHARE * memory


def _ids_of_part(call: SoftmaxCall, reach: int) -> jax.Array:
    """Returns a number per token, of a part and the `reach` tokens before it: tokens with one number see each other.

    Tokens before the part belong to its first document, from where that begins.
    """
    (batch, length), starts_BxL = call.q_BxLxHxD.shape[:2], call.starts_BxL
    if starts_BxL is None:
        starts_BxL = jnp.broadcast_to(call.k_start, (batch, length))
    first_Bx1 = starts_BxL[:, :1]
    before_BxR = jnp.where(jnp.arange(reach) >= jnp.maximum(first_Bx1, call.k_start), first_Bx1, reach + length)
    return jnp.concatenate([before_BxR, starts_BxL], axis=1).astype(jnp.int32)


def _kernel(
    heads: int,
    length: int,
    block: int,
    key_block: int,
    window: int | None,
    fused: bool,
    interpret: bool,
    score_cap: float | None,
) -> Callable:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    shape = (length, length)
    if window is None:
        mask = _remembering(splash.CausalMask)(shape)
    else:
        mask = _remembering(splash.LocalMask)(shape, (window - 1, 0), 0)
    block_sizes = splash.BlockSizes(
        block_q=block,
        block_kv=key_block,
        block_kv_compute=512 if block % 512 == 0 else block,
        block_q_dkv=block,
        block_kv_dkv=key_block,
        block_kv_dkv_compute=block,
        block_q_dq=None if fused else block,
        block_kv_dq=None if fused else key_block,
        use_fused_bwd_kernel=fused,
    )
    return splash.make_splash_mha(
        splash.MultiHeadMask([mask] * heads),
        block_sizes=block_sizes,
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=RESIDUAL_NAME,
        attn_logits_soft_cap=score_cap,
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
