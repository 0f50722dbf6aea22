"""Products of arrays with float32 accumulation, and float32 arrays as operands of bfloat16 products."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
from jax import lax

from lm.ops import platform
from lm.ops.custom_vjp import custom_vjp


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
    letters_a, letters_b, letters = re.split(',|->', formula)
    first, second = _Operand(tuple(letters_a), a), _Operand(tuple(letters_b), b)
    products = [_Product.arrange(*pair, tuple(letters)) for pair in ((first, second), (second, first))]
    return min(products, key=lambda product: product.copied).compute()


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

Axes = tuple[str, ...]
"""Letters, one per axis."""


@dataclasses.dataclass(frozen=True)
class _Operand:
    """An array, and the letters of its axes."""

    axes: Axes
    array: jax.Array


@dataclasses.dataclass(frozen=True)
class _Transposition:
    """The axes of an array before and after a transposition, and the cost of an entry that changes its place."""

    old: Axes
    new: Axes
    weight: int

    def cost(self, sizes: Mapping[str, int]) -> int:
        """Returns the weighted number of entries that are copied: none where only axes of size 1 change places."""
        old, new = ([axis for axis in axes if sizes[axis] > 1] for axes in (self.old, self.new))
        return 0 if old == new else self.weight * _count(self.old, sizes)

    def apply(self, x: jax.Array) -> jax.Array:
        return x.transpose([self.old.index(axis) for axis in self.new])


@dataclasses.dataclass(frozen=True)
class _Product:
    """A batched product of matrices, [batch, rows, contracted] by [batch, contracted, columns].

    Each of the four stands for any number of axes. `letters` are the axes of the result in the requested order.
    """

    first: _Operand
    second: _Operand
    letters: Axes
    batch_axes: Axes
    row_axes: Axes
    column_axes: Axes
    contracted_axes: Axes
    sizes: Mapping[str, int]

    @classmethod
    def arrange(cls, first: _Operand, second: _Operand, letters: Axes) -> '_Product':
        """Returns the product in which the rows of the result are axes of `first`."""
        shared = [axis for axis in first.axes if axis in second.axes]
        return cls(
            first,
            second,
            letters,
            batch_axes=tuple(axis for axis in shared if axis in letters),
            row_axes=tuple(axis for axis in first.axes if axis not in shared),
            column_axes=tuple(axis for axis in second.axes if axis not in shared),
            contracted_axes=tuple(axis for axis in shared if axis not in letters),
            sizes={
                axis: size
                for operand in (first, second)
                for axis, size in zip(operand.axes, operand.array.shape, strict=True)
            },
        )

    # Entries of operands count twice: operands are often computed on the way, and XLA does not vectorize a loop that
    # computes in one order and writes in another.

    @property
    def _of_first(self) -> _Transposition:
        return _Transposition(self.first.axes, (*self.batch_axes, *self.row_axes, *self.contracted_axes), weight=2)

    @property
    def _of_second(self) -> _Transposition:
        return _Transposition(self.second.axes, (*self.batch_axes, *self.contracted_axes, *self.column_axes), weight=2)

    @property
    def _of_result(self) -> _Transposition:
        return _Transposition((*self.batch_axes, *self.row_axes, *self.column_axes), self.letters, weight=1)

    @property
    def copied(self) -> int:
        """The weighted number of entries that change places."""
        return sum(move.cost(self.sizes) for move in (self._of_first, self._of_second, self._of_result))

    def compute(self) -> jax.Array:
        axes = (self.batch_axes, self.row_axes, self.contracted_axes, self.column_axes)
        batch, rows, contracted, columns = (_count(each, self.sizes) for each in axes)
        lead = [batch] if self.batch_axes else []  # `model.remat` keeps products without such an axis
        a = self._of_first.apply(self.first.array).reshape(*lead, rows, contracted)
        product = a @ self._of_second.apply(self.second.array).reshape(*lead, contracted, columns)
        move = self._of_result
        if move.old != move.new:  # else XLA makes a slower product that writes in the other order
            product = lax.optimization_barrier(product)
        return move.apply(product.reshape([self.sizes[axis] for axis in move.old]))


def _count(axes: Iterable[str], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[axis] for axis in axes)


def product(x_AxD: jax.Array, w_DxN: jax.Array) -> jax.Array:
    """Computes x @ w, where A stands for any axes of x before its last."""
    if platform.target_platform() != 'cpu':
        return x_AxD @ w_DxN
    y_TxN = dot('td,dn->tn', x_AxD.reshape(-1, x_AxD.shape[-1]), w_DxN)
    return y_TxN.astype(x_AxD.dtype).reshape(*x_AxD.shape[:-1], -1)


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
        rounded = x if in_kernel else lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        parts.append(rounded.astype(jnp.bfloat16))
        x = x - parts[-1].astype(jnp.float32)
    return parts
