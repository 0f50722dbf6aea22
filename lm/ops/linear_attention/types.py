"""What the implementations of linear attention share: local kernels, the state, the options of a call."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax

FeatureMap = Callable[[Any, jax.Array, bool], jax.Array]
"""(parameters, [B, T, heads, E], queries) → [B, T, heads, F], each token on its own; `queries` says whether the tokens
are queries or keys. A plain function: arrays, random projections too, go through the parameters (a pytree of
floating-point arrays), never through its closure."""

PLAIN = (0.0, 1.0)
"""Powers: features as they are."""

SQUARE = (0.0, 0.0, 1.0)
"""Powers: x ⊗ x."""


LOCAL_BLOCK = 1024
"""Tokens a block of exact weights; the paper's."""


@runtime_checkable
class ProductMap(Protocol):
    """A feature map φ(x) = f(W x, x) that kernels can compute block by block on chip; the others run on XLA.

    It is a `FeatureMap` too, and hashable: the kernels are compiled for it. They form W x themselves, as precisely as
    the features' type deserves, apply f in float32 and round its result; backward they do so again and differentiate.
    """

    learns: bool
    """Whether W has a gradient. Without, the gradient of the parameters is zero and costs nothing."""

    def matrix(self, parameters: Any) -> jax.Array | None:
        """W, [R, E] float32, differentiable in the parameters; None where these settings have no such form."""

    def of_products(self, wx_RxT: jax.Array, x_ExT: jax.Array, queries: bool) -> jax.Array:
        """f, float32: [R, T] and [E, T] → [M, T], tokens last and each on its own; E may be padded with zeros.

        It must lower in a Pallas kernel and be differentiable: elementwise operations, sums and maxima over rows,
        slices of multiples of 8 rows.
        """


@runtime_checkable
class ElementwiseMap(Protocol):
    """A feature map φ(x)_m = f(⟨w_m, x⟩ - s(x)), of which kernels can compute some features apart from the others.

    It is a `FeatureMap` too, and hashable. W has no gradient.
    """

    def rows(self, parameters: Any) -> jax.Array:
        """The w_m, [M, E] float32."""

    def shift(self, x: jax.Array, queries: bool) -> jax.Array | None:
        """s, [..., E] → [...] float32, differentiable in x; None where it is the token's largest ⟨w_m, x⟩, of which no
        gradient is taken."""

    def of_shifted(self, z: jax.Array, features: int) -> jax.Array:
        """f, elementwise and differentiable in float32, for M = features."""


@dataclasses.dataclass(frozen=True)
class PolynomialKernel:
    """Exact weights (scale ⟨q, k⟩)^degree (PolySketchFormer §3.2)."""

    degree: int
    scale: float = 1.0

    stable = False

    def weights(self, s: jax.Array) -> jax.Array:
        return lax.integer_pow(s * self.scale if self.scale != 1.0 else s, self.degree)


@dataclasses.dataclass(frozen=True)
class ExpKernel:
    """Exact weights exp(scale ⟨q, k⟩). Numerator and denominator of a query, approximate part included, are scaled by
    exp(-m), m the largest exponent of its exact part, or 0 where it has an approximate part (approximate attention,
    eq. 2.3-2.4)."""

    scale: float = 1.0

    stable = True


LocalKernel = PolynomialKernel | ExpKernel


class State(NamedTuple):
    """The sums over keys that later queries need, float32. Its size does not depend on the number of keys.

    `kv_BxKxRxD` holds Σ_j φ(k_j) v_jᵀ, where ⟨φ(q), φ(k)⟩ is the approximate weight and φ the implementation's
    (packed) expansion. `totals` holds Σ_j y_j^{⊗n} for each power n with a coefficient other than 0, in order: [B, K]
    for n = 0, [B, K, F] for n = 1, [B, K, F, F] for n = 2.
    """

    kv_BxKxRxD: jax.Array
    totals: tuple[jax.Array, ...]


def faded(sums: Any, log_factor_BxK: jax.Array) -> Any:
    """A `State`, or other sums [B, K, …], times a factor of each key head.

    States compose: with S of some tokens after others whose sums are S₀, and g the sum of the log factors of the
    former, the sums over all are faded(S₀, g) + S.
    """

    def times(x):
        return x * jnp.exp(log_factor_BxK).reshape(*x.shape[:2], *[1] * (x.ndim - 2))

    return jax.tree.map(times, sums)


@dataclasses.dataclass(frozen=True)
class Options:
    """The static arguments of a call. Meanings: `lm.ops.linear_attention.linear_attention`."""

    powers: tuple[float, ...] = PLAIN
    feature_map: FeatureMap | None = None
    local: LocalKernel | None = None
    window: int | None = None
    block: int | None = None
    denominator_bias: float = 1.0
    normalize: bool = True
    causal: bool = True

    def features(self, parameters: Any, x: jax.Array, queries: bool) -> jax.Array:
        """The features of x, [..., T, heads, E] → [..., T, heads, F]."""
        return x if self.feature_map is None else self.feature_map(parameters, x, queries)

    def approximate(self, s: jax.Array) -> jax.Array:
        """The weight of a pair whose features have inner product s."""
        return sum(c * lax.integer_pow(s, n) if n else c * jnp.ones_like(s) for n, c in enumerate(self.powers) if c)
