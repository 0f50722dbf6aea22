"""Random feature maps φ with E⟨φ(q), φ(k)⟩ = exp(scale ⟨q, k⟩), and the maps of generalized attention.

Sources: "seed" is Choromanski et al. 2020 (Masked language modeling for proteins via linearly scalable long-context
transformers); "FAVOR+" is its successor (Rethinking attention with Performers, 2021), which PolySketchFormer measures.

What keeps the exponentials in range may use only what a query sees:
    queries   the largest exponent of a query's own features is subtracted; it divides out of the attention, because
              nothing is added to the features afterwards. `RandomFeatures.log_factor` returns what was taken out.
    keys      nothing is subtracted. A maximum over keys would have to come from the future, or change from key to
              key, where it does not divide out. It is not needed: ω·k - |k|²/2 = |ω|²/2 - |k - ω|²/2 ≤ |ω|²/2 however
              long k is, and the mean of the features is 1 for every key. Exponents are cut at `LIMIT` all the same.

T tokens, N heads, E head size, R rows of the projection, M features.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from lm.attention.maps.products import ProductFeatures

LIMIT = 35.0
"""No exponent is larger: products of a query's and a key's features, summed over millions of keys, stay finite."""


class Projection(NamedTuple):
    """The parameters of a feature map."""

    projection_RxE: jax.Array
    phases_R: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class RandomFeatures(ProductFeatures):
    """A feature map of `lm.ops.linear_attention`.

    Attributes:
        scale: factor of the scores; 1 / sqrt(head size) in softmax attention.
        epsilon: what positive features are raised by, so that no denominator is zero (seed, appendix B.2). Rescaled
            ones are not: the largest of them is 1 / √M, which the features of keys multiply.
        kernel_epsilon: the same for the generalized kernels (appendix B.3).
        rescale: whether a query's features may be divided by a common factor: attention that is normalised.
    """

    scale: float
    epsilon: float = 0.0
    kernel_epsilon: float = 0.0
    rescale: bool = True

    signed = False
    """Estimated weights can be negative."""
    per_row = 1
    """Features per row of the projection."""
    has_phases = False
    learns = False
    """The projection is a buffer: kernels need not compute its gradient, and give zeros."""

    @property
    def dtype(self) -> DTypeLike | None:
        """Sums of signed weights may come near zero, where the rounding of features would be all that is left."""
        return jnp.float32 if self.signed else None

    @property
    def factor(self) -> float:
        return math.sqrt(self.scale)

    def products(self, parameters: Projection) -> tuple[jax.Array, jax.Array | None]:
        return parameters.projection_RxE, parameters.phases_R if self.has_phases else None

    def of_products(self, wx_RxT: jax.Array, x_ExT: jax.Array, queries: bool) -> jax.Array:
        half_1xT = self.scale / 2 * jnp.sum(jnp.square(x_ExT), 0, keepdims=True)
        return self.features(wx_RxT, half_1xT, queries and self.rescale)

    def features(self, wx: jax.Array, half: jax.Array, rescale: bool) -> jax.Array:
        """Maps W x [R, …] and |x|²/2 [1, …] to [M, …]; `rescale` where a common factor of a token is free."""
        raise NotImplementedError

    def log_factor(self, parameters: Projection, x: jax.Array) -> jax.Array:
        """Computes the logs of what rescaled queries were divided by, […, N, E] → […, N] float32 (`RescaledMap`)."""
        wide = x.astype(jnp.float32)
        half = self.scale / 2 * jnp.sum(jnp.square(wide), -1)
        return self.log_divisor(self.multiply(parameters, wide), half)

    def log_divisor(self, wx: jax.Array, half: jax.Array) -> jax.Array:
        """Computes the log of what `features` of W x [R, …] and |x|²/2 […] are divided by with `rescale`, […]."""
        return jnp.zeros_like(half)


class Positive(RandomFeatures):
    """exp(ω·x - |x|²/2) / √M (FAVOR+, Lemma 1): unbiased and positive."""

    def features(self, wx, half, rescale):
        return positive(wx, half, self.epsilon, rescale)

    def log_divisor(self, wx, half):
        return lax.stop_gradient(wx.max(0)) - half

    # The methods of an `ElementwiseMap`: `positive` in parts.

    def rows(self, parameters: Projection) -> jax.Array:
        return self.factor * parameters.projection_RxE

    def shift(self, x: jax.Array, queries: bool) -> jax.Array | None:
        return None if queries and self.rescale else self.scale / 2 * jnp.sum(jnp.square(x), axis=-1)

    def of_shifted(self, z: jax.Array, features: int, queries: bool) -> jax.Array:
        exponent = z - math.log(features) / 2
        raised = 0.0 if queries and self.rescale else self.epsilon / math.sqrt(features)
        return jnp.exp(jnp.where(exponent > LIMIT, LIMIT, exponent)) + raised


class Hyperbolic(Positive):
    """exp(±ω·x - |x|²/2) / √M (FAVOR+, Lemma 1): two features a row, a smaller variance than `Positive`."""

    per_row = 2

    def features(self, wx, half, rescale):
        return super().features(jnp.concatenate([wx, -wx]), half, rescale)

    def log_divisor(self, wx, half):
        return super().log_divisor(jnp.abs(wx), half)

    def rows(self, parameters):
        rows = super().rows(parameters)
        return jnp.concatenate([rows, -rows])


class Trigonometric(RandomFeatures):
    """exp(|x|²/2) [sin ω·x, cos ω·x] √(2/M): the seed's estimator (§2.3, eq. 5-8) in the form without phases."""

    signed = True
    per_row = 2

    def features(self, wx, half, rescale):
        outer = 1.0 if rescale else jnp.exp(jnp.minimum(half, LIMIT))
        return outer * jnp.concatenate([jnp.sin(wx), jnp.cos(wx)]) / math.sqrt(len(wx))

    def log_divisor(self, wx, half):
        return half


class RandomPhases(RandomFeatures):
    """exp(|x|²/2) √(2/M) cos(ω·x + b) with b uniform on [0, 2π): the seed's eq. 10 as it stands."""

    signed = True
    has_phases = True

    def features(self, wx, half, rescale):
        outer = 1.0 if rescale else jnp.exp(jnp.minimum(half, LIMIT))
        return outer * jnp.cos(wx) * math.sqrt(2 / len(wx))

    def log_divisor(self, wx, half):
        return half


class Generalized(RandomFeatures):
    """(f(W x) + kernel_epsilon) / √M: generalized attention with g = h = 1 (seed, §2.2, eq. 9, appendix D.2)."""

    function: Callable[[jax.Array], jax.Array]

    def features(self, wx, half, rescale):
        return (type(self).function(wx) + self.kernel_epsilon) / math.sqrt(len(wx))


def generalized(name: str, function: Callable[[jax.Array], jax.Array], signed: bool) -> type[Generalized]:
    """Returns the generalized feature map of one function f."""
    return type(name.title(), (Generalized,), {'function': staticmethod(function), 'signed': signed})


def positive(wx: jax.Array, half: jax.Array, epsilon: float, rescale: bool) -> jax.Array:
    """Computes (exp(W x - |x|²/2) + epsilon) / √M; a rescaled token's largest exponent becomes 0, without |x|².

    The root of M goes through the exponent: one subtraction a feature does for all. The divisor of a rescaled token has
    no gradient. It is a factor of all its features only while no epsilon is added to them.
    """
    shift = lax.stop_gradient(wx.max(0, keepdims=True)) if rescale else half
    exponent = wx - (shift + math.log(len(wx)) / 2)
    if rescale:
        return jnp.exp(exponent)
    # This equals minimum, whose gradient at ties costs several times as much.
    return jnp.exp(jnp.where(exponent > LIMIT, LIMIT, exponent)) + epsilon / math.sqrt(len(wx))


SOFTMAX_FEATURES: dict[str, type[RandomFeatures]] = {
    'positive': Positive,
    'hyperbolic': Hyperbolic,
    'trigonometric': Trigonometric,
    'random_phases': RandomPhases,
}
"""Unbiased estimators of the softmax kernel."""

GENERALIZED_FEATURES: dict[str, type[RandomFeatures]] = {
    'relu': generalized('relu', jax.nn.relu, signed=False),
    'sigmoid': generalized('sigmoid', jax.nn.sigmoid, signed=False),
    'exp': generalized('exp', lambda x: jnp.exp(jnp.minimum(x, LIMIT)), signed=False),
    'abs': generalized('abs', jnp.abs, signed=False),
    'gelu': generalized('gelu', jax.nn.gelu, signed=True),
    'cos': generalized('cos', jnp.cos, signed=True),
    'tanh': generalized('tanh', jnp.tanh, signed=True),
    'identity': generalized('identity', lambda x: x, signed=True),
}
"""Kernels of generalized attention; they approximate no given kernel."""

FEATURES = SOFTMAX_FEATURES | GENERALIZED_FEATURES
