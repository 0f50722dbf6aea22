"""Products of arrays with float32 accumulation, and float32 arrays as operands of bfloat16 products."""

import functools
import math
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from lm.ops import platform


def dot(formula: str, a: jax.Array, b: jax.Array, precision: lax.Precision | None = None) -> jax.Array:
    """`jnp.einsum(formula, a, b)` in float32, whatever the dtype of the operands; each letter stands in two places.

    XLA's CPU backend refuses some products of bfloat16 with a float32 result at run time, so there the operands are
    made float32 first: the result is the same, since products of two bfloat16 numbers are exact in float32.
    """
    if platform.target_platform() == 'cpu':
        return _dot_on_cpu(formula, a.astype(jnp.float32), b.astype(jnp.float32))
    return jnp.einsum(formula, a, b, precision=precision, preferred_element_type=jnp.float32)


def _with_least_copies(formula: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """The product as XLA's CPU backend multiplies, [N, M, K] by [N, K, L].

    What lies otherwise is copied first, entry by entry, be it many times larger than the other factor; so factors, and
    those of the gradients, take the places in which least is copied. Of products over two axes it makes slower ones.
    """
    letters_a, letters_b, letters = re.split(',|->', formula)
    orders = (((letters_a, a), (letters_b, b)), ((letters_b, b), (letters_a, a)))
    return min((_Product(*order, letters) for order in orders), key=lambda product: product.cost).compute()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot_on_cpu(formula, a, b):
    return _with_least_copies(formula, a, b)


def _backward(formula, factors, d):
    letters_a, letters_b, letters = re.split(',|->', formula)
    a, b = factors
    da = _with_least_copies(f'{letters},{letters_b}->{letters_a}', d, b)
    return da, _with_least_copies(f'{letters_a},{letters}->{letters_b}', a, d)


# The product itself is called here: `model.remat` does not see into what has a gradient of its own.
_dot_on_cpu.defvjp(lambda formula, a, b: (_with_least_copies(formula, a, b), (a, b)), _backward)


class _Product:
    """A product of two arrays, whose axes letters name, in this order."""

    def __init__(self, first: tuple[str, jax.Array], second: tuple[str, jax.Array], letters: str):
        (names, self.a), (others, self.b) = first, second
        shared = [x for x in names if x in others]
        self.sizes = dict(zip(names, self.a.shape, strict=True)) | dict(zip(others, self.b.shape, strict=True))
        self.each, self.summed = ([x for x in shared if (x in letters) == kept] for kept in (True, False))
        self.rows, self.columns = ([x for x in own if x not in shared] for own in (names, others))
        self.moves = (
            (names, [*self.each, *self.rows, *self.summed]),
            (others, [*self.each, *self.summed, *self.columns]),
            ([*self.each, *self.rows, *self.columns], list(letters)),
        )

    @property
    def cost(self) -> int:
        """Entries that change places. Those of factors count twice: they are often computed on the way, and XLA does
        not vectorize a loop that computes in one order and writes in another."""
        factors_and_result = zip((2, 2, 1), self.moves, strict=True)
        return sum(n * self._size(old) for n, (old, new) in factors_and_result if self._long(old) != self._long(new))

    def compute(self) -> jax.Array:
        (of_a, of_b, of_result), shape = self.moves, [self.sizes[x] for x in self.moves[2][0]]
        m, k, columns = map(self._size, (self.rows, self.summed, self.columns))
        each = [self._size(self.each)] if self.each else []  # `model.remat` keeps products without such an axis
        product = _moved(self.a, *of_a).reshape(*each, m, k) @ _moved(self.b, *of_b).reshape(*each, k, columns)
        if of_result[0] != of_result[1]:  # else XLA makes a slower product that writes in the other order
            product = lax.optimization_barrier(product)
        return _moved(product.reshape(shape), *of_result)

    def _size(self, names) -> int:
        return math.prod(self.sizes[x] for x in names)

    def _long(self, names) -> list[str]:
        return [x for x in names if self.sizes[x] > 1]


def _moved(x: jax.Array, names: Sequence[str], wanted: Sequence[str]) -> jax.Array:
    return x.transpose([names.index(name) for name in wanted])


def product(x_AxD: jax.Array, w_DxN: jax.Array) -> jax.Array:
    """x @ w, where x has any axes before its last."""
    if platform.target_platform() != 'cpu':
        return x_AxD @ w_DxN
    y_TxN = dot('td,dn->tn', x_AxD.reshape(-1, x_AxD.shape[-1]), w_DxN)
    return y_TxN.astype(x_AxD.dtype).reshape(*x_AxD.shape[:-1], -1)


def dense(x_BxLxNxGxM: jax.Array, kernel_NxMxR: jax.Array) -> jax.Array:
    """The map of each of N groups, [B, L, N, G, r] in float32; the kernel is rounded to the dtype of x."""
    kernel_NxMxR = kernel_NxMxR.astype(x_BxLxNxGxM.dtype)
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
