"""(I + A)⁻¹ for strictly lower triangular A, by products alone.

Blocks of 8 by their powers, which stay small, then blocks joined in pairs: with X the inverse of the blocks on the
diagonal and C what stands below it in a pair, that of the pair is X - X C X.
"""

import jax
import jax.numpy as jnp
import numpy as np

FIRST = 8
"""Powers of a larger block's A reach 10^18 where all keys are one."""


@jax.custom_vjp
def inverse(a: jax.Array) -> jax.Array:
    """[..., C, C] float32, C a power of two from FIRST on."""
    size = a.shape[-1]
    index = np.arange(size)
    blocks = jnp.where(_blocks(index, FIRST), a, 0.0)
    square = _product(blocks, blocks)
    x = jnp.eye(size) - blocks
    x += _product(x, square)
    x += _product(x, _product(square, square))
    joined = FIRST
    while joined < size:
        joined *= 2
        below = jnp.where(_blocks(index, joined) & ~_blocks(index, joined // 2), a, 0.0)
        x -= _product(_product(x, below), x)
    return x


def _blocks(index: np.ndarray, size: int) -> np.ndarray:
    return index[:, None] // size == index // size


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision='highest')


def _forward(a):
    x = inverse(a)
    return x, x


def _backward(x, dx):
    transposed = x.swapaxes(-1, -2)
    return (jnp.tril(-_product(_product(transposed, dx), transposed), -1),)


inverse.defvjp(_forward, _backward)
