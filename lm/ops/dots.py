"""Products of arrays with float32 accumulation, and float32 arrays as operands of bfloat16 products."""

import functools
import re

import jax
import jax.numpy as jnp
from jax import lax

from lm.ops import platform


def dot(formula: str, a: jax.Array, b: jax.Array, precision: lax.Precision | None = None) -> jax.Array:
    """`jnp.einsum(formula, a, b)` in float32, whatever the dtype of the operands.

    XLA's CPU backend refuses some products of bfloat16 with a float32 result at run time, so there the operands are
    made float32 first: the result is the same, since products of two bfloat16 numbers are exact in float32.
    """
    if platform.target_platform() == 'cpu':
        return _without_copies(formula, a.astype(jnp.float32), b.astype(jnp.float32))
    return jnp.einsum(formula, a, b, precision=precision, preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _without_copies(formula: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """XLA's CPU backend multiplies [M, K] by [K, N]. What lies otherwise is copied first, be it many times larger than
    the other factor, so the factors and those of the gradients take the places in which the smaller one is copied."""
    letters_a, letters_b, letters = re.split(',|->', formula)
    summed = set(letters_a) & set(letters_b) - set(letters)
    a_fits, b_fits = letters_a[-1] in summed, letters_b[-1] in summed  # in the first place
    if b_fits > a_fits or (a_fits == b_fits and (b.size > a.size) == a_fits and a.size != b.size):
        (letters_a, a), (letters_b, b) = (letters_b, b), (letters_a, a)
    shared = [x for x in letters_a if x in letters_b]
    over, by_row = ([x for x in shared if (x in summed) == found] for found in (True, False))
    places = [tuple(map(own.index, axes)) for axes in (over, by_row) for own in (letters_a, letters_b)]
    product = lax.dot_general(a, b, (tuple(places[:2]), tuple(places[2:])), preferred_element_type=jnp.float32)
    found = [*by_row, *(x for x in letters_a if x not in shared), *(x for x in letters_b if x not in shared)]
    return product.transpose([found.index(x) for x in letters])


def _backward(formula, factors, d):
    letters_a, letters_b, letters = re.split(',|->', formula)
    a, b = factors
    da = _without_copies(f'{letters},{letters_b}->{letters_a}', d, b)
    return da, _without_copies(f'{letters_a},{letters}->{letters_b}', a, d)


_without_copies.defvjp(lambda formula, a, b: (_without_copies(formula, a, b), (a, b)), _backward)


def dense(x_BxLxNxGxM: jax.Array, kernel_NxMxR: jax.Array) -> jax.Array:
    """The map of each of N groups, [B, L, N, G, r] in float32; the kernel is rounded to the dtype of x."""
    kernel_NxMxR = kernel_NxMxR.astype(x_BxLxNxGxM.dtype)
    if kernel_NxMxR.shape[0] == 1 and platform.target_platform() == 'cpu':
        # One matrix product of two axes, which XLA's CPU backend runs several times faster, forward and backward. On
        # TPUs merging axes would be a copy: their tokens lie on the lanes.
        y_TxR = dot('tm,mr->tr', x_BxLxNxGxM.reshape(-1, kernel_NxMxR.shape[1]), kernel_NxMxR[0])
        return y_TxR.reshape(*x_BxLxNxGxM.shape[:-1], -1)
    if kernel_NxMxR.shape[0] == 1:
        return dot('blngm,mr->blngr', x_BxLxNxGxM, kernel_NxMxR[0])
    return dot('blngm,nmr->blngr', x_BxLxNxGxM, kernel_NxMxR)


def in_three(x: jax.Array) -> list[jax.Array]:
    """Three bfloat16 arrays whose sum is the float32 array x to 24 bits.

    A moment Σ y yᵀ rounded to bfloat16 makes denominators negative where keys are concentrated and the query is
    orthogonal to them.
    """
    parts = []
    for _ in range(3):
        parts.append(x.astype(jnp.bfloat16))
        x = x - parts[-1].astype(jnp.float32)
    return parts
