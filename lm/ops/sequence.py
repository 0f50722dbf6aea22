"""One window over many devices: how its parts exchange arrays.

A mesh may have the axis `sequence`: windows are then cut into equal parts, one per device, in order. `over_tokens` runs
a function of tokens on each part. Code that treats each token by itself works there unchanged. Attention asks its
neighbours, by the other functions of this file. Outside of `over_tokens`, and without such an axis, the window is one
part.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from lm.ops.errors import OperationError
from lm.ops.platform import SEQUENCE_AXIS as AXIS
from lm.ops.platform import per_device, sequence_shards, uneven_batch

Tree = TypeVar('Tree')


def over_tokens(function: Callable, token_axes: tuple[int | None, ...]) -> Callable:
    """Returns `function`, run on each part of the window; if tokens do not split evenly, each device runs the whole.

    Args:
        function: takes arrays (or trees of them, or None) and returns arrays [B, L].
        token_axes: of each argument the axis that counts tokens; None where it has none and each device has it whole.
            Gradients of whole arguments are summed over the parts.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = {name: size for name, size in mesh.shape.items() if name not in mesh.manual_axes}
    parts = axes.get(AXIS, 1)
    if parts == 1:
        return function

    def specs(axis: int | None) -> PartitionSpec:
        return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, AXIS)

    def on_parts(*arguments):
        if any(a.shape[axis] % parts for a, axis in zip(arguments, token_axes, strict=True) if axis is not None):
            return function(*arguments)
        in_specs, out_specs = tuple(map(specs, token_axes)), specs(1)
        # Kernels are refused wherever the compiler is left to split something, be it by one.
        options = {'axis_names': {name for name, size in axes.items() if name == AXIS or size == 1}, 'check_vma': False}
        return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, **options)(*arguments)

    return on_parts


def index() -> jax.Array | int:
    """Returns the number of this part of the window."""
    return lax.axis_index(AXIS) if sequence_shards() > 1 else 0


def gathered(x: jax.Array) -> jax.Array:
    """Returns [B, L, …] of the whole window from the arrays of all parts."""

    def gather(x):
        return lax.all_gather(x, AXIS, axis=1, tiled=True)

    # If the split of rows were left to the compiler, every device would gather the rows of all others as well.
    return gather(x) if uneven_batch(x.shape[0]) else per_device(gather, (True,))(x)


def tokens_before(x: jax.Array, count: int) -> jax.Array:
    """Returns the `count` tokens before this part, [B, count, …]; zeros before the first part."""
    if sequence_shards() == 1:
        return jnp.zeros((x.shape[0], count, *x.shape[2:]), x.dtype)
    if count > x.shape[1]:
        raise OperationError(f'mesh.sequence: parts of {x.shape[1]} tokens have not the {count} that the next one sees')
    return _from(1, x[:, x.shape[1] - count :])


def halves(parts: int) -> list[tuple[int, int]]:
    """Returns the halves of parts that `balanced` gives each part, numbered from the first of the window on."""
    pairs = [(i, 2 * parts - 1 - i) for i in range(parts)]
    return [(early, late) if early % 2 == 0 else (late, early) for early, late in pairs]


def balanced(x: jax.Array) -> jax.Array:
    """Exchanges the halves of this part for two others, `halves`: tokens early and late in the window, [B, L, …].

    So queries that see the keys before them see as many on each device.
    """
    return _exchanged(x, back=False)


def in_order(x: jax.Array) -> jax.Array:
    """Undoes `balanced`."""
    return _exchanged(x, back=True)


def _exchanged(x: jax.Array, back: bool) -> jax.Array:
    """Exchanges half n of a part for half n of another: even ones are first halves before and after."""
    moved = []
    for n, half in enumerate(jnp.split(x, 2, axis=1)):
        routes = [(pair[n] // 2, part) for part, pair in enumerate(halves(sequence_shards()))]
        moved.append(lax.ppermute(half, AXIS, [route[::-1] if back else route for route in routes]))
    return jnp.concatenate(moved, axis=1)


def carried(part: Tree, compose: Callable[[Tree, Tree], Tree]) -> Tree:
    """Composes the arrays of all parts before this one, in order.

    Args:
        part: a tree of arrays, of this part.
        compose: takes the trees of an earlier and a later stretch of the window. A tree of zeros must stand for an
            empty stretch.
    """
    total, distance = _from(1, part), 1
    while distance < sequence_shards():
        total = compose(_from(distance, total), total)
        distance *= 2
    return total


def _from(distance: int, x: Tree) -> Tree:
    """Returns x of the part so many places before; zeros where there is none."""
    return lax.ppermute(x, AXIS, [(i, i + distance) for i in range(sequence_shards() - distance)])
