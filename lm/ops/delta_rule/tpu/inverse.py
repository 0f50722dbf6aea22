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

from lm.ops.tpu import SUBLANES, dot


def inverse(m_CxC: jax.Array, split: bool) -> Generator[None, None, jax.Array]:
    """Returns (I + M)⁻¹, float32; others take their turn after each product.

    Args:
        m_CxC: M, float32, zeros on and below the diagonal; C a power of two and at least 8.
        split: compute products of float32 numbers in three parts of bfloat16, to 16 bits, instead of six, to 24.
    """
    size = m_CxC.shape[0]
    x_LxC = _solve_blocks(_take_diagonal(m_CxC))
    while len(x_LxC) < size:
        x_LxC = yield from _join(x_LxC, m_CxC, _multiply_in_parts if split else _multiply_exactly)
    return x_LxC


def _take_diagonal(m_CxC):
    """Returns the blocks of 8 on the diagonal, side by side."""
    of = _number_lanes(m_CxC) // SUBLANES
    parts = [jnp.where(of == i, m_CxC[SUBLANES * i : SUBLANES * (i + 1)], 0.0) for i in range(len(m_CxC) // SUBLANES)]
    return sum(parts[1:], parts[0])


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


def _join(x_LxC, m_CxC, product):
    """Returns the inverses of blocks of twice the size."""
    length, size = x_LxC.shape
    of = _number_lanes(x_LxC) // length
    odd = of % 2 == 1
    beside, later = [], []
    for i in range(size // length):
        rows = m_CxC[length * i : length * (i + 1)]
        beside.append(jnp.where(of == i + 1, rows, 0.0) if i % 2 == 0 else jnp.zeros_like(rows))
        later.append(jnp.where(of == i, x_LxC, 0.0))
    half = product(x_LxC, jnp.concatenate(beside))
    yield
    joint = product(half, jnp.concatenate(later))
    yield
    return jnp.concatenate([jnp.where(odd, -joint, x_LxC), jnp.where(odd, x_LxC, 0.0)])


def _number_lanes(x):
    return lax.broadcasted_iota(jnp.int32, (1, x.shape[1]), 1)


def _multiply_exactly(a, b):
    return dot(a, b, (1, 0))


def _multiply_in_parts(a, b):
    (a_high, a_low), (b_high, b_low) = _split(a), _split(b)
    both = dot(jnp.concatenate([a_high, a_low]), b_high, (1, 0))
    return both[: len(a)] + both[len(a) :] + dot(a_high, b_low, (1, 0))


def _split(x):
    """Returns two bfloat16 arrays whose sum is x to 16 bits."""
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)
