"""The inverse of I + M, M strictly upper triangular, on a TPU: solved in blocks of 8, which are then joined in pairs.

    [A  B]⁻¹    [A⁻¹  -A⁻¹ B D⁻¹]
    [0  D]    = [0           D⁻¹]

All intermediate results are inverses of parts of the matrix. With keys of length 1 their entries stay at about 1,
where the powers of M reach 10^18.

The blocks of size L on the diagonal lie side by side, [L, C] of a matrix of C columns. One product with L rows thus
multiplies all of them by the blocks beside them.
"""

from collections.abc import Generator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from lm.ops.dots import in_parts
from lm.ops.tpu import SUBLANES, dot
from lm.ops.tpu.masks import keep, take_diagonal


def inverse(m_CxC: jax.Array, split: bool) -> Generator[None, None, jax.Array]:
    """Returns (I + M)⁻¹, float32; others take their turn after each product.

    Args:
        m_CxC: M, float32, zeros on and below the diagonal; C a power of two and at least 8.
        split: compute products of float32 numbers in three parts of bfloat16, to 16 bits, instead of six, to 24.
    """
    x_LxC, m = _solve_blocks(take_diagonal(m_CxC)), _part(m_CxC, split)
    while len(x_LxC) < len(m_CxC):
        x_LxC = yield from _join(x_LxC, m, split)
    return x_LxC


def _solve_blocks(m_8xC):
    """Returns the inverses of blocks of 8, solved row by row from the last one up."""
    lane = _number_lanes(m_8xC) % SUBLANES
    row = lax.broadcasted_iota(jnp.int32, m_8xC.shape, 0)
    x = jnp.where(row == lane, 1.0, 0.0)
    columns = _spread(m_8xC, lane)
    for s in range(SUBLANES - 1, 0, -1):
        x -= columns[s] * x[s : s + 1]
    return x


def _spread(x_8xC, lane):
    """Returns 8 arrays, one per column of a block: x with this column in all lanes of the block."""
    found = [x_8xC]
    for bit in (4, 2, 1):
        high = (lane & bit) != 0
        # The half of the lanes that has the column gives it to the other half.
        found = [
            jnp.where(high, rolled, x) if low else jnp.where(high, x, rolled)
            for x in found
            for low, rolled in ((True, _roll(x, bit)), (False, _roll(x, -bit)))
        ]
    return found


def _roll(x, by):
    return pltpu.roll(x, by % x.shape[1], 1)


def _join(x_LxC, m, split):
    """Returns the inverses of blocks of twice the size; `m` has the parts of M."""
    length, size = x_LxC.shape
    odd = _number_lanes(x_LxC) // length % 2 == 1
    x = _part(x_LxC, split)
    half = _multiply(x, [_take_beside(part, length) for part in m])
    yield
    joint = _multiply(_part(half, split), [_repeat_odd(part, size) for part in x])
    yield
    return jnp.concatenate([jnp.where(odd, -joint, x_LxC), jnp.where(odd, x_LxC, 0.0)])


def _take_beside(m_CxC, length):
    """Returns the blocks at the right of each first block of a pair, 0 elsewhere."""
    rows = [m_CxC[at : at + 2 * length] for at in range(0, len(m_CxC), 2 * length)]
    return jnp.concatenate([_keep(x, 2 * i + 1, length, first=True) for i, x in enumerate(rows)])


def _repeat_odd(x_LxC, size):
    """Returns the second block of each pair in its place on the diagonal; rows of first blocks may be any of it."""
    length, pair = len(x_LxC), jnp.concatenate([x_LxC, x_LxC])
    return jnp.concatenate([_keep(pair, 2 * i + 1, length, first=False) for i in range(size // (2 * length))])


def _keep(rows_2LxC, block, length, first):
    """Returns the lanes of a block of a pair's rows, 0 elsewhere, of the first rows alone or of at least the second."""
    lanes = _number_lanes(rows_2LxC) // length == block
    if length * rows_2LxC.dtype.itemsize % (4 * SUBLANES):
        # Both blocks share a register.
        words = len(rows_2LxC) * rows_2LxC.dtype.itemsize // 4
        row = lax.broadcasted_iota(jnp.int32, (words, rows_2LxC.shape[1]), 0)
        return keep(rows_2LxC, lanes & (row < words // 2) if first else lanes)
    none = jnp.zeros_like(rows_2LxC[:length])
    if first:
        return jnp.concatenate([keep(rows_2LxC[:length], lanes), none])
    return jnp.concatenate([none, keep(rows_2LxC[length:], lanes)])


def _number_lanes(x):
    return lax.broadcasted_iota(jnp.int32, (1, x.shape[1]), 1)


def _multiply(a, b):
    """Multiplies two factors in parts."""
    if len(a) == 1:
        return dot(a[0], b[0], (1, 0))
    (a_high, a_low), (b_high, b_low) = a, b
    both = dot(jnp.concatenate([a_high, a_low]), b_high, (1, 0))
    return both[: len(a_high)] + both[len(a_high) :] + dot(a_high, b_low, (1, 0))


def _part(x, split):
    return in_parts(x, 2) if split else [x]
