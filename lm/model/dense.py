"""Products with the matrices of a layer."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from lm.ops.dots import products
from lm.ops.platform import SHARED_AXIS, batch_axes, uneven_batch
from lm.parameters import shared_axis


class Dense(nnx.Linear):
    """Computes x W + b in the type of the layer; each device needs the whole W for its own windows."""

    def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
        return self.pieces(x_BxLxD, [self.out_features])[0]

    def pieces(self, x_BxLxD: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
        """Computes x W + b cut into parts of `sizes` columns, as `lm.ops.dots.products` does."""
        cuts = np.cumsum(sizes)[:-1].tolist()
        kernel_DxN = self.kernel[...].astype(self.dtype)
        parts = multiply_gathered(x_BxLxD.astype(self.dtype), kernel_DxN, cuts)
        if self.bias is None:
            return parts
        biases = jnp.split(self.bias[...].astype(self.dtype), cuts)
        return [part_BxLxN + bias_N for part_BxLxN, bias_N in zip(parts, biases, strict=True)]

    def lone_matrix(self) -> jax.Array | None:
        """Returns W in the type of the layer, where the layer computes x W and no more; else None."""
        return None if self.bias is not None else self.kernel[...].astype(self.dtype)


class LowRank(nnx.Module):
    """Computes x A B: a product whose matrix A B has the rank of A (Kimi Team 2025, Kimi Linear, §4, output gate)."""

    def __init__(self, down: Dense, up: Dense):
        self.down, self.up = down, up

    def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
        return self.up(self.down(x_BxLxD))


def multiply_gathered(x_BxLxD: jax.Array, kernel_DxN: jax.Array, cuts: Sequence[int]) -> list[jax.Array]:
    """Computes x W, cut before the columns `cuts`.

    If devices share a matrix, it is gathered from them first, in its present type. Its gradient is summed and scattered
    at once (ZeRO, Rajbhandari et al. 2020, stage 3). Otherwise XLA exchanges W or its gradient piece by piece between
    pieces of the products. These are too narrow for the matrix units, and XLA writes and copies the activations.
    """
    mesh, axes = jax.sharding.get_abstract_mesh(), batch_axes()
    axis = shared_axis(kernel_DxN.shape, mesh.shape[SHARED_AXIS]) if SHARED_AXIS in axes else None
    if axis is None:
        return products(x_BxLxD, kernel_DxN, cuts)
    return run_on_gathered(functools.partial(products, cuts=cuts), [x_BxLxD], [kernel_DxN])


def run_on_gathered(function: Callable, arrays: Sequence[jax.Array], matrices: Sequence[jax.Array]) -> Any:
    """Calls function(*arrays, *matrices) on each device's rows of the batch, with the whole matrices.

    Matrices that devices share are gathered from them first. If the rows do not split evenly, the partitioner decides.

    Args:
        function: returns arrays whose first axis is the batch.
        arrays: their first axis is the batch.
        matrices: of the layer, with any number of axes.
    """
    mesh, axes = jax.sharding.get_abstract_mesh(), batch_axes()
    if not axes or uneven_batch(arrays[0].shape[0]):
        return function(*arrays, *matrices)
    shared = [shared_axis(each.shape, mesh.shape[SHARED_AXIS]) if SHARED_AXIS in axes else None for each in matrices]
    rows = PartitionSpec(axes)
    specs = [PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, SHARED_AXIS) for axis in shared]
    names = set(mesh.axis_names) - set(mesh.manual_axes)

    def gather_and_run(*arguments: jax.Array) -> object:
        parts = zip(arguments[len(arrays) :], shared, strict=True)
        whole = [part if axis is None else gather_matrix(part, axis) for part, axis in parts]
        return function(*arguments[: len(arrays)], *whole)

    split = jax.shard_map(
        gather_and_run, in_specs=(*[rows] * len(arrays), *specs), out_specs=rows, axis_names=names, check_vma=False
    )
    return split(*arrays, *matrices)


def gather_matrix(part: jax.Array, axis: int) -> jax.Array:
    """Gathers a matrix from the parts of all devices, cut along `axis`.

    The parts are stacked in front: XLA has no scattered sum along an axis whose parts fill no tiles of registers, and
    sums the whole matrix on every device instead.
    """
    stacked = lax.all_gather(jnp.moveaxis(part, axis, 0), SHARED_AXIS)
    return jnp.moveaxis(stacked.reshape(-1, *stacked.shape[2:]), 0, axis)
