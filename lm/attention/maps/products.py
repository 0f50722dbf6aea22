"""Feature maps φ(x) = f(W x + b, x), each written once: kernels compute f block by block on chip, XLA calls the map."""

import abc
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


class ProductFeatures(abc.ABC):
    """Base: a `ProductMap` of `lm.ops.linear_attention`, of which a subclass writes `products` and `of_products`.

    Subclasses are hashable (frozen dataclasses): operations are compiled for them. R rows of W, E size of the vectors.
    """

    learns = True
    """W and b have gradients."""
    dtype: DTypeLike | None = None
    """The type of the features that a call returns; None: the type of the vectors."""

    factor = 1.0
    """The factor of W x. XLA applies it to the products: it would prepare a factor of W before its loop, once per use,
    and then compute products that it considers different."""

    @abc.abstractmethod
    def products(self, parameters: Any) -> tuple[jax.Array, jax.Array | None]:
        """Returns W [R, E] and b [R] or None; or for N heads [N, R, E] and [N, R], which kernels do not support."""

    @abc.abstractmethod
    def of_products(self, wx_RxT: jax.Array, x_ExT: jax.Array, queries: bool) -> jax.Array:
        """Computes f, [R, …] and [E, …] → [M, …], float32 (`ProductMap`). More axes may follow the first."""

    def matrix(self, parameters: object) -> jax.Array | None:
        """Returns W where kernels can compute the features: one matrix for all heads, and no b."""
        weight, shift = self.products(parameters)
        return self.factor * weight if weight.ndim == 2 and shift is None else None

    def __call__(self, parameters: object, x: jax.Array, queries: bool) -> jax.Array:
        """Computes […, N, E] → […, N, M]; products and f in float32."""
        wide = x.astype(jnp.float32)  # not every backend has a product of bfloat16 into float32
        features = self.of_products(self.multiply(parameters, wide), jnp.moveaxis(wide, -1, 0), queries)
        return jnp.moveaxis(features, 0, -1).astype(self.dtype or x.dtype)

    def multiply(self, parameters: object, wide: jax.Array) -> jax.Array:
        """Computes W x + b of float32 vectors, […, N, E] → [R, …, N]."""
        weight, shift = self.products(parameters)
        wx = self.factor * jnp.einsum('nre,...ne->r...n' if weight.ndim == 3 else 're,...ne->r...n', weight, wide)
        if shift is not None:
            wx += jnp.moveaxis(shift, -1, 0).reshape(wx.shape[0], *[1] * (wx.ndim - 2), -1)
        return wx
