"""`jax.custom_vjp` as a decorator with arguments."""

from collections.abc import Callable
from typing import TypeVar, cast

import jax

Result = TypeVar('Result')


def custom_vjp(*static: int) -> Callable[[Callable[..., Result]], jax.custom_vjp[Result]]:
    """Returns `jax.custom_vjp`, as a decorator, for functions whose arguments at the places `static` are no arrays.

    Unlike `functools.partial(jax.custom_vjp, …)` it keeps the type of the result for type checkers.
    """

    def decorate(function: Callable[..., Result]) -> jax.custom_vjp[Result]:
        return cast(jax.custom_vjp[Result], jax.custom_vjp(function, nondiff_argnums=static))

    return decorate
