"""Products with the matrices of a layer."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

SHARDS = 'fsdp'
"""The axis of the mesh over which parameters are sharded."""


class Dense(nnx.Linear):
    """x W + b in the type that the layer computes in, where each device needs all of W for its own windows.

    What is sharded over devices is gathered first, in that type, and once more in the backward pass, whose gradients
    are scattered again (ZeRO, Rajbhandari et al. 2020, stage 3). Left to itself, XLA exchanges W piece by piece between
    pieces of the product, and writes and copies the activations instead.
    """

    def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
        return self.pieces(x_BxLxD, [self.out_features])[0]

    def pieces(self, x_BxLxD: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
        """x W + b cut into parts of `sizes` columns, each a product of its own.

        What the backward pass takes of a product is stacked over the layers. XLA reads it where it lies, but of a
        product of which parts are taken it first copies what belongs to a layer.
        """
        cuts = np.cumsum(sizes)[:-1]
        x_BxLxD = x_BxLxD.astype(self.dtype)
        kernel_DxN = self.kernel[...].astype(self.dtype)
        if _shards() > 1:
            kernel_DxN = gathered(kernel_DxN)
        products = [x_BxLxD @ part_DxN for part_DxN in jnp.split(kernel_DxN, cuts, axis=1)]
        if self.bias is None:
            return products
        biases = jnp.split(self.bias[...].astype(self.dtype), cuts)
        return [product_BxLxN + bias_N for product_BxLxN, bias_N in zip(products, biases, strict=True)]


@jax.custom_vjp
def gathered(kernel_DxN: jax.Array) -> jax.Array:
    """The same, whole on each device; its gradient is sharded over its largest axis that can be."""
    return lax.with_sharding_constraint(kernel_DxN, PartitionSpec())


def _forward(kernel_DxN):
    return gathered(kernel_DxN), None


def _backward(_, gradient_DxN):
    axes = [i for i, n in enumerate(gradient_DxN.shape) if n % _shards() == 0]
    if axes:
        axis = max(axes, key=lambda i: gradient_DxN.shape[i])
        gradient_DxN = lax.with_sharding_constraint(gradient_DxN, PartitionSpec(*[None] * axis, SHARDS))
    return (gradient_DxN,)


gathered.defvjp(_forward, _backward)


def _shards() -> int:
    return jax.sharding.get_abstract_mesh().shape.get(SHARDS, 1)
