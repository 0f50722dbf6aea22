"""The powers of features: x^{⊗n} for each power of a polynomial, packed, and their inner products with sums over keys.

x ⊗ x has F (F + 1) / 2 distinct entries. They are cut in strips of `STRIP` rows, of each of which only the part from
the diagonal on is formed: 640 instead of 1,024 products for F = 32, 2,304 instead of 4,096 for F = 64. A strip's part
right of its square on the diagonal counts twice. Queries and keys are expanded alike; coefficients and counts are
multiplied into the sums, once a block.

Denominators do not go through the packing: Σ_j ⟨x, y_j⟩² = xᵀ (Σ_j y_j y_jᵀ) x, in float32.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

STRIP = 8
"""Measured on a CPU and by compiling for TPUs: shorter strips save products and lose as much to their number."""


def expand(powers: tuple[float, ...], x: jax.Array, one: jax.Array | None = None) -> jax.Array:
    """φ(x): [..., F] → [..., R] in the dtype of x; products are formed in float32.

    Args:
        powers: coefficients of the polynomial; only which are 0 matters here.
        x: features.
        one: what stands for x^{⊗0}, [...]; None is 1.
    """
    wide, pieces, power = x.astype(jnp.float32), [], None
    for n in range(len(powers)):
        power = _raise(power, wide, one, n)
        if powers[n]:
            pieces += power
    if powers[1:] and powers[1] and len(pieces) == 1:
        return x
    return jnp.concatenate([piece.astype(x.dtype) for piece in pieces], axis=-1)


def weights(powers: tuple[float, ...], size: int) -> np.ndarray:
    """[R] float32: coefficient times count of each entry of φ, for F = size."""
    parts = []
    for n, coefficient in enumerate(powers):
        if not coefficient:
            continue
        counts = np.ones(1 if n == 0 else size)
        if n >= 2:
            strips = ((g, min(STRIP, size - g)) for g in range(0, size, STRIP))
            counts = [np.r_[np.ones(s), np.full(size - g - s, 2.0)] for g, s in strips for _ in range(s)]
            counts = np.repeat(np.concatenate(counts), size ** (n - 2))
        parts.append(coefficient * counts)
    return np.concatenate(parts).astype(np.float32)


def _raise(power: list[jax.Array] | None, x: jax.Array, one: jax.Array | None, n: int) -> list[jax.Array]:
    lead, size = x.shape[:-1], x.shape[-1]
    if n == 0:
        return [jnp.ones((*lead, 1), x.dtype) if one is None else jnp.broadcast_to(one, lead)[..., None]]
    if n == 1:
        return [x]
    if n == 2:
        strips = ((x[..., g : g + STRIP, None] * x[..., None, g:]) for g in range(0, size, STRIP))
        return [strip.reshape(*lead, -1) for strip in strips]
    return [(piece[..., :, None] * x[..., None, :]).reshape(*lead, -1) for piece in power]


def totals(powers: tuple[float, ...], y_BxKxTxF: jax.Array, one_T: jax.Array | None = None) -> tuple[jax.Array, ...]:
    """Σ_t y_t^{⊗n} for each power, unpacked, float32."""
    y, result = y_BxKxTxF.astype(jnp.float32), []
    for n, coefficient in enumerate(powers):
        if not coefficient:
            continue
        if n == 0:
            count = y.shape[2] if one_T is None else one_T.sum()
            result.append(jnp.full(y.shape[:2], count, jnp.float32))
        elif n == 1:
            result.append(y.sum(2))
        else:
            left = y
            for _ in range(n - 2):
                left = (left[..., :, None] * y[..., None, :]).reshape(*y.shape[:3], -1)
            power = jnp.einsum('bktl,bktf->bklf', left, y, precision=lax.Precision.HIGHEST)
            result.append(power.reshape(*y.shape[:2], *y.shape[3:] * n))
    return tuple(result)


def read_totals(powers: tuple[float, ...], x_BxKxGxTxF: jax.Array, sums: tuple[jax.Array, ...]) -> jax.Array:
    """Σ_n powers[n] ⟨x^{⊗n}, sums_n⟩, [B, K, G, T] float32."""
    x, result = x_BxKxGxTxF.astype(jnp.float32), jnp.float32(0.0)
    degrees = [n for n, coefficient in enumerate(powers) if coefficient]
    for n, total in zip(degrees, sums, strict=True):
        flat = total.reshape(*total.shape[:2], -1)
        if n == 0:
            read = jnp.broadcast_to(flat[:, :, None], x.shape[:-1])
        elif n == 1:
            read = jnp.einsum('bkgtf,bkf->bkgt', x, flat, precision=lax.Precision.HIGHEST)
        else:
            flat = total.reshape(*total.shape[:2], x.shape[-1], -1)
            rest = jnp.einsum('bkgtf,bkfl->bkgtl', x, flat, precision=lax.Precision.HIGHEST)
            for _ in range(n - 1):
                rest = jnp.einsum('bkgtf,bkgtfl->bkgtl', x, rest.reshape(*x.shape, -1))
            read = rest[..., 0]
        result += powers[n] * read
    return result


def empty(powers: tuple[float, ...], batch: int, heads: int, size: int, values: int) -> tuple[jax.Array, tuple]:
    """The sums over no keys."""
    degrees = [n for n, coefficient in enumerate(powers) if coefficient]
    zeros = tuple(jnp.zeros((batch, heads, *[size] * n), jnp.float32) for n in degrees)
    return jnp.zeros((batch, heads, len(weights(powers, size)), values), jnp.float32), zeros


def packed_size(powers: tuple[float, ...], size: int) -> int:
    """R for F = size."""
    return len(weights(powers, size))


def distinct_size(powers: tuple[float, ...], size: int) -> int:
    """How many distinct products the expansion has; R would be this with strips of one row."""
    return sum(math.comb(size + n - 1, n) for n, coefficient in enumerate(powers) if coefficient)
