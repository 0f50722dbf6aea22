"""What a backward pass of attention takes from the forward pass, saved by name."""

from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name

RESIDUAL_NAME = 'attention_residuals'
"""`jax.checkpoint` policies that save this name do not run the attention again in the backward pass."""


def saved(x: jax.Array) -> jax.Array:
    """x under that name."""
    return checkpoint_name(x, RESIDUAL_NAME)


def recomputed(function: Callable) -> Callable:
    """function, computed again in the backward pass: all that is kept of it are its arguments.

    As `jax.checkpoint` has it, but whatever the policy around it: those that keep products would keep the float32
    products of sketches, which are larger than what they are made of.
    """

    @jax.custom_vjp
    def run(*arguments):
        return function(*arguments)

    def backward(arguments, cotangent):
        return jax.vjp(function, *arguments)[1](cotangent)

    run.defvjp(lambda *arguments: (function(*arguments), arguments), backward)
    return run
