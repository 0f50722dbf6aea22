"""Powers of inner products, as kernels compute them, and quotients of their sums."""

import jax


def power_and_slope(s: jax.Array, degree: int) -> tuple[jax.Array, jax.Array | None]:
    """Returns s ** degree, and s ** (degree - 1), by repeated squaring; the latter is None where it is 1."""
    if degree == 1:
        return s, None
    slope, exponent, square = None, degree - 1, s
    while exponent:
        if exponent & 1:
            slope = square if slope is None else slope * square
        exponent >>= 1
        if exponent:
            square = square * square
    assert slope is not None, 'the exponent has at least one bit'
    if degree & (degree - 1) == 0:
        return square * square, slope
    return slope * s, slope


@jax.custom_jvp
def quotient(o: jax.Array, total: jax.Array) -> jax.Array:
    """Computes o / total. Its derivative in `total` is formed as -(o / total) / total.

    JAX would form total⁻², which leaves float32 beyond 1.8e19. Signed weights of high degree reach that, and gradients
    would silently be 0.
    """
    return o / total


@quotient.defjvp
def _quotient_jvp(primals, tangents):
    (o, total), (do, dtotal) = primals, tangents
    result = o / total
    return result, (do - result * dtotal) / total
