"""Arrays that a backward pass takes from the forward pass, saved by name."""

from collections.abc import Callable

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from lm.ops import platform

RESIDUAL_NAME = 'attention_residuals'
"""`jax.checkpoint` policies that save this name do not run the attention again in the backward pass."""
PRODUCT_NAME = 'kernel_products'
"""Policies that keep products with parameters save this name too, because a kernel hides its products from JAX."""


def save_residual(x: jax.Array, name: str = RESIDUAL_NAME) -> jax.Array:
    """Returns x under a name, in the forward function of a `jax.custom_vjp`; it has no gradient.

    It saves x bit-cast to integers. JAX would otherwise store a second, rounded copy of a float that is also used: one
    more pass over memory behind a kernel.
    """
    bits = lax.bitcast_convert_type(x, f'uint{8 * x.dtype.itemsize}')
    if platform.target_platform() == 'gpu' and jax.__version_info__ < (0, 12):
        # This version of XLA runs a kernel twice if a scan stacks its result: a copy of the kernel writes into the
        # stack.
        bits = lax.optimization_barrier(bits)
    return lax.bitcast_convert_type(checkpoint_name(bits, name), x.dtype)


def recompute(function: Callable) -> Callable:
    """Returns a function that saves its result and its arguments only: the backward pass computes the rest again.

    `jax.checkpoint` does the same, but a policy around it may change that: policies that keep products would keep the
    float32 products of sketches, which are larger than the arrays that they are made of.
    """

    @jax.custom_vjp
    def run(*arguments):
        return function(*arguments)

    def backward(arguments, cotangent):
        return jax.vjp(function, *arguments)[1](cotangent)

    run.defvjp(lambda *arguments: (save_residual(function(*arguments)), arguments), backward)
    return run
