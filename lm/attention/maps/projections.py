"""Random projections W [features, size] for random feature maps: every row is N(0, I), or nearly so.

The rows may be independent, or orthogonal inside each square block of `size` rows, which lowers the variance of the
estimates made with them (Choromanski et al. 2020, §2.4).
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def iid(key: jax.Array, features: int, size: int) -> jax.Array:
    """Draws independent rows."""
    return jax.random.normal(key, (features, size))


def orthogonal(key: jax.Array, features: int, size: int) -> jax.Array:
    """Draws R-ORF: rows of random rotations with the lengths of Gaussian vectors, so that each row alone is N(0, I)."""
    rotation_key, length_key = jax.random.split(key)
    n_blocks = -(-features // size)
    gaussian_NxSxS = jax.random.normal(rotation_key, (n_blocks, size, size))
    rotation_NxSxS, r_NxSxS = jnp.linalg.qr(gaussian_NxSxS)
    # The signs of R's diagonal make the rotation uniform; the factorization alone fixes them arbitrarily.
    rotation_NxSxS *= jnp.sign(jnp.diagonal(r_NxSxS, axis1=-2, axis2=-1))[..., None, :]
    return _stretch(rotation_NxSxS, length_key, features)


def givens(key: jax.Array, features: int, size: int) -> jax.Array:
    """Draws G-ORF: each block is a product of S ⌈ln S⌉ rotations by random angles, each in a random plane of two axes.

    Rows have the lengths of Gaussian vectors. Their directions are nearly uniform, hence a bias that vanishes as the
    size grows (Choromanski et al. 2020, §2.4). The product is kept dense, as the product of `hadamard` is.
    """
    row_key, other_key, angle_key, length_key = jax.random.split(key, 4)
    n_blocks = -(-features // size)
    count = size * math.ceil(math.log(size))
    angle_TxN = jax.random.uniform(angle_key, (count, n_blocks), maxval=2 * math.pi)
    row_TxN = jax.random.randint(row_key, (count, n_blocks), 0, size)
    other_TxN = (row_TxN + jax.random.randint(other_key, (count, n_blocks), 1, size)) % size

    def rotate(w_SxS, row, other, angle):
        turn_2x2 = jnp.array([[jnp.cos(angle), jnp.sin(angle)], [-jnp.sin(angle), jnp.cos(angle)]])
        both = jnp.stack([row, other])
        return w_SxS.at[both].set(jnp.matmul(turn_2x2, w_SxS[both], precision='highest'))

    def rotate_all(w_NxSxS, drawn):
        return jax.vmap(rotate)(w_NxSxS, *drawn), None

    w_NxSxS = jnp.broadcast_to(jnp.eye(size), (n_blocks, size, size))
    w_NxSxS, _ = lax.scan(rotate_all, w_NxSxS, (row_TxN, other_TxN, angle_TxN))
    return _stretch(w_NxSxS, length_key, features)


def hadamard(key: jax.Array, features: int, size: int) -> jax.Array:
    """Draws H-ORF: √S (H D₁)(H D₂)(H D₃) with Hadamard matrices H and random signs D (Choromanski et al. 2017, §3).

    Rows have length √size instead of a Gaussian one, hence a bias that vanishes as the size grows. Sizes that are no
    power of two keep the first columns of the next one. 3 signs a feature hold all its randomness; the product is
    kept dense, because a [2048, 64] matrix product is faster than the transform on every accelerator.
    """
    side = 1 << (size - 1).bit_length()
    n_blocks = -(-features // side)
    signs_NxTxS = jax.random.rademacher(key, (n_blocks, 3, side), jnp.float32)
    h_SxS = hadamard_matrix(side)
    w_NxSxS = jnp.broadcast_to(jnp.eye(side), (n_blocks, side, side))
    for i in range(3):
        w_NxSxS = w_NxSxS @ h_SxS * signs_NxTxS[:, i, None, :]
    return np.sqrt(side) * w_NxSxS.reshape(-1, side)[:features, :size]


def hadamard_matrix(side: int) -> np.ndarray:
    """Returns the orthogonal Hadamard matrix; `side` is a power of two."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < side:
        matrix = np.kron(np.array([[1, 1], [1, -1]], np.float32), matrix)
    return matrix / np.sqrt(side).astype(np.float32)


def _stretch(rotation_NxSxS: jax.Array, key: jax.Array, features: int) -> jax.Array:
    """Gives the first rows of rotations the lengths of Gaussian vectors, so that each row alone is N(0, I)."""
    size = rotation_NxSxS.shape[-1]
    length_F = jnp.linalg.norm(jax.random.normal(key, (features, size)), axis=-1)
    return rotation_NxSxS.reshape(-1, size)[:features] * length_F[:, None]


PROJECTIONS: dict[str, Callable[[jax.Array, int, int], jax.Array]] = {
    'iid': iid,
    'orthogonal': orthogonal,
    'hadamard': hadamard,
    'givens': givens,
}
