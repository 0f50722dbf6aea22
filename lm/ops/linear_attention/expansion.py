"""The powers of features: x^{⊗n} for each power of a polynomial, packed, and their inner products with sums over keys.

x ⊗ x has F (F + 1) / 2 distinct entries. They are cut in strips of `STRIP` rows, and each strip begins at the diagonal:
640 instead of 1,024 products for F = 32, 2,304 instead of 4,096 for F = 64. A strip's part right of its square on the
diagonal counts twice. Queries and keys are expanded alike; coefficients and counts are multiplied into the sums, once
per block. Tokens are the last axis: all products are then of whole vectors of tokens (measured on a CPU: three times as
fast as with features last; on TPUs it decides everything).

Denominators do not go through the packing: Σ_j ⟨x, y_j⟩² = xᵀ (Σ_j y_j y_jᵀ) x, in float32.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lm.ops.dots import dot

STRIP = 8
"""Rows per strip. Shorter strips save products and lose as much to their number (measured on a CPU and by compiling for
TPUs)."""


MOST_WRITTEN_OUT = 64
"""The most features for which the gradient of their products is written out."""


def expand(
    powers: tuple[float, ...], x_BxKxFxT: jax.Array, one: jax.Array | None = None
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Returns φ(x) in pieces [B, K, Rᵢ, …T], in the dtype of x, and x in float32 for its other readers.

    Products are formed in float32. Other gradients of this x are added where the gradient of φ is formed.

    Args:
        powers: coefficients of the polynomial; only their zeros matter here.
        x_BxKxFxT: features; any number of axes may follow.
        one: the value of x^{⊗0}, [T]; None is 1.
    """
    wide, result, power = x_BxKxFxT.astype(jnp.float32), [], []
    for n in range(len(powers)):
        power, wide = _raise(power, wide, one, n)
        if powers[n]:
            result += power
    return tuple(piece.astype(x_BxKxFxT.dtype) for piece in result), wide


def weights(powers: tuple[float, ...], size: int) -> tuple[np.ndarray, ...]:
    """Returns coefficient times count of each entry of φ, in the pieces of `expand`, [Rᵢ] float32, for F = size."""
    result, counts = [], [np.ones(1)]
    for n, coefficient in enumerate(powers):
        if n == 1:
            counts = [np.ones(size)]
        elif n == 2:
            counts = [_strip_counts(size, g) for g in range(0, size, STRIP)]
        elif n > 2:
            counts = [np.repeat(c, size) for c in counts]
        if coefficient:
            result += [(coefficient * c).astype(np.float32) for c in counts]
    return tuple(result)


def _strip_counts(size: int, start: int) -> np.ndarray:
    rows = min(STRIP, size - start)
    return np.tile(np.r_[np.ones(rows), np.full(size - start - rows, 2.0)], rows)


def _raise(power: list[jax.Array], x: jax.Array, one: jax.Array | None, n: int) -> tuple[list[jax.Array], jax.Array]:
    """Returns x^{⊗n} for x^{⊗n-1}, and x."""
    if n == 0:
        shape = (*x.shape[:2], 1, *x.shape[3:])
        return [jnp.ones(shape, x.dtype) if one is None else jnp.broadcast_to(one.astype(x.dtype), shape)], x
    if n == 1:
        return [x], x
    if n == 2:
        return _square(x)
    return [_outer(piece, x) for piece in power], x


def _outer(a: jax.Array, b: jax.Array) -> jax.Array:
    return (a[:, :, :, None] * b[:, :, None]).reshape(*a.shape[:2], -1, *a.shape[3:])


def _strips(x: jax.Array) -> list[jax.Array]:
    return [_outer(x[:, :, g : g + STRIP], x[:, :, g:]) for g in range(0, x.shape[2], STRIP)]


@jax.custom_vjp
def _square(x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    return _strips(x), x


def _square_backward(x: jax.Array, gradients: tuple[list[jax.Array], jax.Array]) -> tuple[jax.Array]:
    """Adds whole vectors of tokens, tile by tile of STRIP × STRIP products.

    The sums are written out as additions, because XLA makes one loop of them. It makes one kernel per reduction, which
    takes twenty times as long on a CPU. Additions to their concatenation take three times as long, so the other
    gradients of x are added here. Many tiles would compile slowly.
    """
    d, dx = gradients
    size, lead, rest = x.shape[2], x.shape[:2], x.shape[3:]
    starts = range(0, size, STRIP)
    if size > MOST_WRITTEN_OUT:
        return (jax.vjp(_strips, x)[1](d)[0] + dx,)
    rows, result = ([a[:, :, g : g + STRIP] for g in starts] for a in (x, dx))
    for a, (g, strip) in enumerate(zip(starts, d, strict=True)):
        strip = strip.reshape(*lead, -1, size - g, *rest)
        for b in range(a, len(rows)):
            tile = strip[:, :, :, starts[b] - g : starts[b] - g + STRIP]
            result[b] += sum(tile[:, :, i] * rows[a][:, :, i : i + 1] for i in range(tile.shape[2]))
            result[a] += sum(tile[:, :, :, j] * rows[b][:, :, j : j + 1] for j in range(tile.shape[3]))
    return (jnp.concatenate(result, axis=2),)


_square.defvjp(lambda x: (_square(x), x), _square_backward)


def totals(
    powers: tuple[float, ...],
    y_BxKxFxT: jax.Array,
    one_T: jax.Array | None = None,
    factors_BxKxT: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """Computes Σ_t factors_t y_t^{⊗n} for each power, unpacked, float32; without factors they are 1."""
    y, result = y_BxKxFxT.astype(jnp.float32), []
    weighted = y if factors_BxKxT is None else y * factors_BxKxT[:, :, None]
    for n, coefficient in enumerate(powers):
        if not coefficient:
            continue
        if n == 0 and factors_BxKxT is not None:
            result.append((factors_BxKxT if one_T is None else factors_BxKxT * one_T).sum(2))
        elif n == 0:
            count = y.shape[3] if one_T is None else one_T.sum()
            result.append(jnp.full(y.shape[:2], count, jnp.float32))
        elif n == 1:
            result.append(weighted.sum(3))
        else:
            left = weighted
            for _ in range(n - 2):
                left = _outer(left, y)
            power = dot('bklt,bkft->bklf', left, y, lax.Precision.HIGHEST)
            result.append(power.reshape(*y.shape[:2], *[y.shape[2]] * n))
    return tuple(result)


def read_totals(powers: tuple[float, ...], x_BxKxFxGxT: jax.Array, sums: tuple[jax.Array, ...]) -> jax.Array:
    """Computes Σ_n powers[n] ⟨x^{⊗n}, sums_n⟩, [B, K, G, T] float32."""
    x, result = x_BxKxFxGxT.astype(jnp.float32), jnp.float32(0.0)
    degrees = [n for n, coefficient in enumerate(powers) if coefficient]
    for n, total in zip(degrees, sums, strict=True):
        if n == 0:
            read = jnp.broadcast_to(total[:, :, None, None], (*x.shape[:2], *x.shape[3:]))
        elif n == 1:
            read = dot('bkf,bkfgt->bkgt', total, x, lax.Precision.HIGHEST)
        else:
            flat = total.reshape(*total.shape[:2], x.shape[2], -1)
            rest = dot('bkfl,bkfgt->bklgt', flat, x, lax.Precision.HIGHEST)
            for _ in range(n - 1):
                rest = (x[:, :, :, None] * rest.reshape(*x.shape[:3], -1, *x.shape[3:])).sum(2)
            read = rest[:, :, 0]
        result += powers[n] * read
    return result


def empty_totals(powers: tuple[float, ...], batch: int, heads: int, size: int) -> tuple[jax.Array, ...]:
    """Returns the `totals` of no tokens."""
    return tuple(jnp.zeros((batch, heads, *[size] * n), jnp.float32) for n, c in enumerate(powers) if c)
