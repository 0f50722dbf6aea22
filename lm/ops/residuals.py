"""What a backward pass of attention takes from the forward pass, saved by name."""

from collections.abc import Callable

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from lm.ops import platform

RESIDUAL_NAME = 'attention_residuals'
"""`jax.checkpoint` policies that save this name do not run the attention again in the backward pass."""


def saved(x: jax.Array) -> jax.Array:
    """x under that name, in the forward function of a `jax.custom_vjp`: no gradient passes through it.

    It is kept as the integers that its bits are. Of numbers that are kept and used as well JAX makes a rounded copy, to
    the precision that they have: behind a kernel that is one more pass over memory.
    """
    bits = lax.bitcast_convert_type(x, f'uint{8 * x.dtype.itemsize}')
    if platform.target_platform() == 'gpu' and jax.__version_info__ < (0, 12):
        # That XLA runs a kernel whose result a scan stacks twice: a copy of it writes into the stack.
        bits = lax.optimization_barrier(bits)
    return lax.bitcast_convert_type(checkpoint_name(bits, RESIDUAL_NAME), x.dtype)


def recomputed(function: Callable) -> Callable:
    """function, whose result is `saved` and of which nothing else is kept but its arguments: the backward pass computes
    the rest again.

    As `jax.checkpoint` has it, but whatever the policy around it: those that keep products would keep the float32
    products of sketches, which are larger than what they are made of.
    """

    @jax.custom_vjp
    def run(*arguments):
        return function(*arguments)

    def backward(arguments, cotangent):
        return jax.vjp(function, *arguments)[1](cotangent)

    run.defvjp(lambda *arguments: (saved(function(*arguments)), arguments), backward)
    return run
