"""Walks along an axis in blocks that need not divide it.

The last block is moved left until it fits, so nothing is padded; `find_new` finds the entries that no earlier block
has.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lm.ops import platform


def even_block(length: int, most: int) -> int:
    """Returns the size of the fewest nearly equal blocks of at most `most`, rounded up to 8 for the vector units."""
    parts = -(-length // most)
    return min(length, most, -(-length // parts // 8) * 8)


def start(index: jax.Array | int, block: int, length: int) -> jax.Array:
    """Returns the index at which block `index` begins."""
    return jnp.minimum(index * block, length - block)


def find_new(index: jax.Array | int, block: int, length: int) -> jax.Array:
    """Returns [block] booleans: True for entries of block `index` that are in no block before it."""
    return start(index, block, length) + jnp.arange(block) >= index * block


def take(x: jax.Array, at: jax.Array | int, block: int, axis: int) -> jax.Array:
    """Returns `block` entries of x along `axis` from `at`; x itself where the block is all of it."""
    return x if block == x.shape[axis] else lax.dynamic_slice_in_dim(x, at, block, axis)


def put(x: jax.Array, part: jax.Array, at: jax.Array | int, axis: int) -> jax.Array:
    """Returns x with `part` written along `axis` from `at`."""
    part = part.astype(x.dtype)
    return part if part.shape == x.shape else lax.dynamic_update_slice_in_dim(x, part, at, axis)


def call_in_branch(at: jax.Array | int, function: Callable, *slices: object) -> Any:
    """Returns function(*slices), in a branch of its own, for slices that a loop cuts at `at` (0 or more).

    XLA's CPU backend would cut the slices again in each loop that reads them. It does not vectorize a loop that cuts a
    slice at an index known only at run time. A branch gets whole arrays: linear attention is 1.3 to 1.6 times as fast.
    """
    if platform.target_platform() != 'cpu' or isinstance(at, int):
        return function(*slices)

    def never(*slices):
        return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(function, *slices))

    return lax.cond(at >= 0, function, never, *slices)


def loop(low: jax.Array | int, high: jax.Array | int, body: Callable[[Any, Any], Any], carry: Any, once: bool) -> Any:
    """`lax.fori_loop`, or the body alone where there is one block: a short sequence costs what plain einsums cost."""
    return body(0, carry) if once else lax.fori_loop(low, high, body, carry)
