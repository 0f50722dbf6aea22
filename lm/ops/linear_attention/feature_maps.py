"""Feature maps, and the forms of them that kernels and mixtures with other weights ask for."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax

FeatureMap = Callable[[Any, jax.Array, bool], jax.Array]
"""A function (parameters, [B, T, heads, E], queries) → [B, T, heads, F], each token by itself. `queries` is True for
queries and False for keys. A feature map is a plain function: arrays, random projections too, go through the parameters
(a pytree of floating-point arrays), never through its closure."""


@runtime_checkable
class ProductMap(Protocol):
    """A feature map φ(x) = f(W x, x) that kernels can compute block by block on chip; other maps run on XLA.

    It is a `FeatureMap` too, and hashable: the kernels are compiled for it. They form W x as precisely as the features'
    type needs, apply f in float32 and round its result. In the backward pass they do so again and differentiate.
    """

    learns: bool
    """True if W has a gradient. Without one, the gradient of the parameters is zero and costs nothing."""

    def __call__(self, parameters: Any, x: jax.Array, queries: bool, /) -> jax.Array:
        """Computes the features, as any `FeatureMap`."""
        ...

    def matrix(self, parameters: Any) -> jax.Array | None:
        """Returns W, [R, E] float32, differentiable in the parameters; None where the map has no such form."""

    def of_products(self, wx_RxT: jax.Array, x_ExT: jax.Array, queries: bool) -> jax.Array:
        """Computes f in float32: [R, T] and [E, T] → [M, T], each token by itself; E may be padded with zeros.

        It must lower in a Pallas kernel and be differentiable: elementwise operations, sums and maxima over rows,
        slices of multiples of 8 rows.
        """
        ...


@runtime_checkable
class ElementwiseMap(Protocol):
    """A feature map φ(x)_m = f(⟨w_m, x⟩ - s(x)). Kernels can compute some of its features without the others.

    It is a `FeatureMap` too, and hashable. W has no gradient.
    """

    def rows(self, parameters: Any) -> jax.Array:
        """Returns the w_m, [M, E] float32."""
        ...

    def shift(self, x: jax.Array, queries: bool) -> jax.Array | None:
        """Computes s, [..., E] → [...] float32, differentiable in x.

        None: s is the token's largest ⟨w_m, x⟩, and no gradient flows through it. Its exponential must then be a factor
        of all features of the token, which cancels.
        """

    def of_shifted(self, z: jax.Array, features: int, queries: bool) -> jax.Array:
        """Computes f, elementwise and differentiable in float32, for M = features."""
        ...


@runtime_checkable
class RescaledMap(Protocol):
    """A feature map that may leave a factor of each query out of the query's features.

    The factor cancels where it is a factor of all weights of the query. Beside the exact weights of an `ExpKernel` it
    is not: the operation then puts it back. Beside other weights such a map is refused.
    """

    @property
    def rescale(self) -> bool:
        """True if features of queries lack their factors."""
        ...

    def log_factor(self, parameters: Any, x: jax.Array) -> jax.Array:
        """Computes the logs of the factors that weights of queries lack, [B, T, heads, E] → [B, T, heads] float32.

        The factor times the weights is differentiable in x and the parameters. Where the features were divided by a
        number without gradient, its log has none here either.
        """
        ...
