"""Building blocks of the TPU kernels: the sizes of registers, the layout feature by token, products.

Inside the kernels everything is feature by token ([N, F, L], N = batch · heads, tokens on the 128 lanes): heads of 64
and sketches of 32 or 64 features would leave half of the lanes idle.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from lm.ops.platform import batch_shards, per_device, target_platform, uneven_batch

LANES = 128

MIB = 2**20

SUBLANES = 8
"""Rows of a float32 register."""

ROWS = 16
"""Rows of a bfloat16 register: what feature axes are padded to."""


def padded_rows(size: int) -> int:
    """Returns the rows of `size` features."""
    return -(-size // ROWS) * ROWS


def by_token(a_BxLxKxF: jax.Array, length: int, heads: int) -> jax.Array:
    """Returns [B · heads, padded F, length]: each of K heads repeated until there are `heads`, zeros in the padding."""
    batch, tokens, count, rows = a_BxLxKxF.shape
    a_BxHxFxL = a_BxLxKxF.transpose(0, 2, 3, 1)
    if heads > count:
        a_BxHxFxL = jnp.repeat(a_BxHxFxL, heads // count, axis=1)
    a_BxHxFxL = jnp.pad(a_BxHxFxL, ((0, 0), (0, 0), (0, padded_rows(rows) - rows), (0, length - tokens)))
    return a_BxHxFxL.reshape(batch * heads, padded_rows(rows), length)


def by_head(o_NxFxL: jax.Array, like_BxLxHxE: jax.Array, size: int) -> jax.Array:
    """Returns [B, L, H, size], the inverse of `by_token`; `like` has the batch, length and heads."""
    batch, length, heads, _ = like_BxLxHxE.shape
    o_BxHxFxL = o_NxFxL.reshape(batch, heads, *o_NxFxL.shape[1:])[:, :, :size, :length]
    return o_BxHxFxL.transpose(0, 3, 1, 2)


def tokens_on_lanes(x_BxLxF: jax.Array) -> jax.Array:
    """Returns x, which a TPU then keeps feature by token.

    XLA lays arrays that it saves for a backward pass out as the forward pass made them. Around kernels the gradients of
    a layer lie feature by token. Saved arrays that meet them would be transposed: a pass over HBM for nothing.
    """
    *rest, length, _ = x_BxLxF.shape
    # A few tokens, as in decoding, would fill no lanes.
    if target_platform() != 'tpu' or length < LANES or uneven_batch(x_BxLxF.shape[0]):
        return x_BxLxF
    order = (*range(len(rest)), len(rest) + 1, len(rest))
    # The partitioner does not see through the constraint, and would have every device gather the whole batch.
    return per_device(lambda x: with_layout_constraint(x, Layout(major_to_minor=order)), (True,))(x_BxLxF)


def lone_windows(x_BxLxF: jax.Array) -> jax.Array:
    """Returns [B L, F] for TPUs of which every device has one window, else x.

    With a batch of one, XLA does not fuse the operations after the product of a gradient. With more rows, or without a
    batch axis, it does.
    """
    batch, length, size = x_BxLxF.shape
    if target_platform() != 'tpu' or length < LANES or batch != batch_shards():
        return x_BxLxF
    return x_BxLxF.reshape(batch * length, size)


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Computes a · b over one axis of each, accumulated in float32; float32 operands are not rounded."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    axes = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, axes, precision=precision, preferred_element_type=jnp.float32)
