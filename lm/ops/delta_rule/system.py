"""The triangular systems of the delta rule's chunks, (I + A) U = B, A strictly lower triangular, in plain XLA.

Rows are solved in blocks, from the first on. What earlier rows add is one product, and the block on the diagonal is
inverted:

    U_i = (I + A_ii)⁻¹ (B_i - Σ_{j < i} A_ij U_j)

The library call `triangular_solve` computes the same. On a CPU it takes several times as long. Where several run at
once, each may wait for ever for the threads that the others hold (jaxlib 0.10.2).
"""

import jax
import jax.numpy as jnp
from jax import lax

from lm.ops.custom_vjp import custom_vjp
from lm.ops.dots import dot

BLOCK = 8
"""Rows per block. Inverses of larger blocks lose precision where keys are alike and β is 2."""


@custom_vjp()
def solve(a_BxKxNxCxC: jax.Array, given_BxKxNxCxD: jax.Array) -> jax.Array:
    """Returns U [B, K, N, C, D] with (I + A) U = `given`, float32. Entries of A on and above the diagonal must be 0."""
    return _substitute(a_BxKxNxCxC, given_BxKxNxCxD)


def _forward(a_BxKxNxCxC, given_BxKxNxCxD):
    u_BxKxNxCxD = _substitute(a_BxKxNxCxC, given_BxKxNxCxD)
    return u_BxKxNxCxD, (a_BxKxNxCxC, u_BxKxNxCxD)


def _backward(residuals, du_BxKxNxCxD):
    a_BxKxNxCxC, u_BxKxNxCxD = residuals
    # The transposed system, read from its end, is lower triangular again.
    turned_BxKxNxCxC = jnp.flip(a_BxKxNxCxC.mT, (-2, -1))
    dgiven_BxKxNxCxD = jnp.flip(_substitute(turned_BxKxNxCxC, jnp.flip(du_BxKxNxCxD, -2)), -2)
    da_BxKxNxCxC = -dot('bknid,bknjd->bknij', dgiven_BxKxNxCxD, u_BxKxNxCxD, lax.Precision.HIGHEST)
    return jnp.tril(da_BxKxNxCxC, -1), dgiven_BxKxNxCxD


solve.defvjp(_forward, _backward)


def _substitute(a_BxKxNxCxC, given_BxKxNxCxD):
    """Returns U. Rows of zeros fill up the last block."""
    size = a_BxKxNxCxC.shape[-1]
    filling = -size % BLOCK
    a_BxKxNxCxC = jnp.pad(a_BxKxNxCxC, [(0, 0)] * 3 + [(0, filling)] * 2)
    given_BxKxNxCxD = jnp.pad(given_BxKxNxCxD, [(0, 0)] * 3 + [(0, filling), (0, 0)])
    starts = range(0, size, BLOCK)
    blocks = jnp.stack([a_BxKxNxCxC[..., i : i + BLOCK, i : i + BLOCK] for i in starts])
    inverses_MxBxKxNxLxL = _invert(blocks)
    u_BxKxNxCxD = given_BxKxNxCxD[..., :0, :]
    for i, inverse_BxKxNxLxL in zip(starts, inverses_MxBxKxNxLxL, strict=True):
        rest_BxKxNxLxD = given_BxKxNxCxD[..., i : i + BLOCK, :]
        if i:
            rest_BxKxNxLxD -= _multiply(a_BxKxNxCxC[..., i : i + BLOCK, :i], u_BxKxNxCxD)
        solved_BxKxNxLxD = _multiply(inverse_BxKxNxLxL, rest_BxKxNxLxD)
        u_BxKxNxCxD = jnp.concatenate([u_BxKxNxCxD, solved_BxKxNxLxD], axis=-2)
    return u_BxKxNxCxD[..., :size, :]


def _invert(a_MxBxKxNxLxL):
    """Returns the inverses of I + A, row by row: each row takes the rows above it."""
    identity = jnp.eye(a_MxBxKxNxLxL.shape[-1], dtype=jnp.float32)
    x = jnp.broadcast_to(identity, a_MxBxKxNxLxL.shape)
    for i in range(1, len(identity)):
        above = jnp.sum(a_MxBxKxNxLxL[..., i, :i, None] * x[..., :i, :], axis=-2)
        x = x.at[..., i, :].set(identity[i] - above)
    return x


def _multiply(a_BxKxNxIxJ, b_BxKxNxJxD):
    return dot('bknij,bknjd->bknid', a_BxKxNxIxJ, b_BxKxNxJxD, lax.Precision.HIGHEST)
