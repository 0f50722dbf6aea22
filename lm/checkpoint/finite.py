"""Weights that are not finite, refused by the name of their first array.

One number that is NaN or infinite makes every prediction of a model NaN.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lm.checkpoint.checksum import reduce_each, take_here
from lm.checkpoint.snapshot import flatten
from lm.errors import MismatchError


def find_not_finite(arrays: Mapping[str, Any]) -> str | None:
    """Returns the name of the first array that holds NaN or an infinity; None: all numbers are finite.

    `arrays` are all of JAX or all of NumPy. All processes that hold arrays of JAX must call it together.
    """
    here = arrays if all(isinstance(array, np.ndarray) for array in arrays.values()) else take_here(arrays)
    if here is not None:
        return next((name for name, array in here.items() if not _is_finite_here(array)), None)
    return next((name for name, finite in reduce_each(_is_finite, arrays).items() if not finite), None)


def refuse_not_finite(weights: object, what: str, remedy: str) -> None:
    """Raises MismatchError (`what`, the first array, `remedy`) for nested dicts of weights that are not finite."""
    if name := find_not_finite(flatten(weights)):
        raise MismatchError(f'{what}: {describe_not_finite(name)}; {remedy}')


def describe_not_finite(name: str) -> str:
    """Describes an array that is not finite."""
    return f'the numbers of {name} are not all finite'


@jax.jit
def _is_finite(x: jax.Array) -> jax.Array:
    return jnp.isfinite(x).all()


def _is_finite_here(array: np.ndarray) -> bool:
    # Neither extreme needs memory, and both pass NaN on.
    return not array.size or bool(np.isfinite(array.min()) and np.isfinite(array.max()))
