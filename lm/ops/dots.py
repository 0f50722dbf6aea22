"""Products of arrays with float32 accumulation, and float32 arrays as operands of bfloat16 products."""

import math
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from lm.ops import platform
from lm.ops.custom_vjp import custom_vjp

FEW = 64
"""Rows: a matrix is larger than its products with so few."""


def dot(formula: str, a: jax.Array, b: jax.Array, precision: lax.Precision | None = None) -> jax.Array:
    """Computes `jnp.einsum(formula, a, b)` in float32, whatever the dtype of the operands.

    Each letter stands in two places. XLA's CPU backend refuses some products of bfloat16 with a float32 result at run
    time, so there the operands are made float32 first: the result is the same, since products of two bfloat16 numbers
    are exact in float32.
    """
    if platform.target_platform() == 'cpu':
        return _dot_on_cpu(formula, a.astype(jnp.float32), b.astype(jnp.float32))
    return jnp.einsum(formula, a, b, precision=precision, preferred_element_type=jnp.float32)


def _with_least_copies(formula: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Computes the product as XLA's CPU backend multiplies, [N, M, K] by [N, K, L].

    An operand that lies otherwise is copied first, entry by entry, be it many times larger than the other one. So
    operands take the places in which least is copied, in gradients too. Products over two axes become slower.
    """
    first, second, letters = re.split(',|->', formula)
    sizes = dict(zip(first + second, a.shape + b.shape, strict=True))

    def count(axes: str) -> int:
        return math.prod(sizes[axis] for axis in axes)

    def group_axes(first: str, second: str) -> tuple[str, str, str, str]:
        """Returns the axes of batch, rows, contraction and columns; rows of the result are axes of `first`."""
        shared = [axis for axis in first if axis in second]
        batch, contracted = (''.join(axis for axis in shared if (axis in letters) == kept) for kept in (True, False))
        rows, columns = (''.join(axis for axis in axes if axis not in shared) for axes in (first, second))
        return batch, rows, contracted, columns

    def measure_copies(first: str, second: str) -> int:
        """Returns the weighted number of entries that change places: none where only axes of size 1 do.

        Entries of operands count twice: operands are often computed on the way, and XLA does not vectorize a loop that
        computes in one order and writes in another.
        """
        batch, rows, contracted, columns = group_axes(first, second)
        moves = [(first, batch + rows + contracted, 2), (second, batch + contracted + columns, 2)]
        moves.append((batch + rows + columns, letters, 1))
        wide = [[[axis for axis in axes if sizes[axis] > 1] for axes in (old, new)] for old, new, _ in moves]
        return sum(weight * count(old) for (old, _, weight), (x, y) in zip(moves, wide, strict=True) if x != y)

    if measure_copies(second, first) < measure_copies(first, second):
        first, second, a, b = second, first, b, a
    batch, rows, contracted, columns = group_axes(first, second)
    lead = [count(batch)] if batch else []  # `model.remat` keeps products without such an axis
    a = _transpose(a, first, batch + rows + contracted).reshape(*lead, count(rows), count(contracted))
    b = _transpose(b, second, batch + contracted + columns).reshape(*lead, count(contracted), count(columns))
    product, found = a @ b, batch + rows + columns
    if found != letters:  # else XLA makes a slower product that writes in the other order
        product = lax.optimization_barrier(product)
    return _transpose(product.reshape([sizes[axis] for axis in found]), found, letters)


def _transpose(x: jax.Array, old: str, new: str) -> jax.Array:
    return x.transpose([old.index(axis) for axis in new])


@custom_vjp(0)
def _dot_on_cpu(formula: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return _with_least_copies(formula, a, b)


def _backward(formula, operands, d):
    letters_a, letters_b, letters = re.split(',|->', formula)
    a, b = operands
    da = _with_least_copies(f'{letters},{letters_b}->{letters_a}', d, b)
    return da, _with_least_copies(f'{letters_a},{letters}->{letters_b}', a, d)


# The product itself is called here: `model.remat` does not see into what has a gradient of its own.
_dot_on_cpu.defvjp(lambda formula, a, b: (_with_least_copies(formula, a, b), (a, b)), _backward)


def product(x_AxD: jax.Array, w_DxN: jax.Array) -> jax.Array:
    """Computes x @ w, where A stands for any axes of x before its last."""
    if platform.target_platform() != 'cpu':
        return x_AxD @ w_DxN
    y_TxN = dot('td,dn->tn', x_AxD.reshape(-1, x_AxD.shape[-1]), w_DxN)
    return y_TxN.astype(x_AxD.dtype).reshape(*x_AxD.shape[:-1], -1)


def products(x_AxD: jax.Array, w_DxN: jax.Array, cuts: Sequence[int]) -> list[jax.Array]:
    """Computes x @ w, cut before the columns `cuts`, each part as a product of its own.

    The arrays that the backward pass reads are stacked over the layers. XLA reads the array of a whole product in
    place. If parts of a product are read, XLA first copies the layer's array.

    The products of FEW rows, as in decoding, are one product whose result is cut: XLA on CPUs would write a copy of
    each part of w first.
    """
    if math.prod(x_AxD.shape[:-1]) <= FEW:
        return jnp.split(product(x_AxD, w_DxN), cuts, axis=-1)
    return [product(x_AxD, columns_DxN) for columns_DxN in jnp.split(w_DxN, cuts, axis=1)]


def dense(x_BxLxNxGxM: jax.Array, kernel_NxMxR: jax.Array) -> jax.Array:
    """Maps each of N groups, [B, L, N, G, r] in float32; the kernel is rounded to the dtype of x."""
    kernel_NxMxR = kernel_NxMxR.astype(x_BxLxNxGxM.dtype)
    if kernel_NxMxR.shape[0] == 1:
        return dot('blngm,mr->blngr', x_BxLxNxGxM, kernel_NxMxR[0])
    return dot('blngm,nmr->blngr', x_BxLxNxGxM, kernel_NxMxR)


def in_parts(x: jax.Array, count: int, in_kernel: bool = True) -> list[jax.Array]:
    """Returns bfloat16 arrays whose sum is the float32 array x to 8 bits per array.

    A moment Σ y yᵀ rounded to bfloat16 makes denominators negative where keys are concentrated and the query is
    orthogonal to them. So it takes three.

    Args:
        x: float32.
        count: the number of arrays.
        in_kernel: whether Pallas compiles this, which has no other rounding than casts. XLA may leave out a cast there
            and back.
    """
    parts = []
    for _ in range(count):
        x = x - parts[-1].astype(jnp.float32) if parts else x
        rounded = x if in_kernel else lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        parts.append(rounded.astype(jnp.bfloat16))
    return parts
