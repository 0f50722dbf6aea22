"""Powers of inner products, as kernels compute them."""

import jax


def power_and_slope(s: jax.Array, degree: int) -> tuple[jax.Array, jax.Array | None]:
    """s ** degree, and s ** (degree - 1), which is None where it is 1, by repeated squaring."""
    if degree == 1:
        return s, None
    slope, exponent, square = None, degree - 1, s
    while exponent:
        if exponent & 1:
            slope = square if slope is None else slope * square
        exponent >>= 1
        if exponent:
            square = square * square
    if degree & (degree - 1) == 0:
        return square * square, slope
    return slope * s, slope
