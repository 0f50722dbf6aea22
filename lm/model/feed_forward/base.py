"""The base of feed-forward layers: a configuration that a gin file names.

    model.feed_forward = @experts()

Each has a dense part, linear units that all tokens pass, or a routed part, or both. Adding one means adding one file.
"""

import abc
import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from lm.config.configurable import Configurable
from lm.ops.gated_units import ACTIVATIONS


@dataclasses.dataclass(frozen=True)
class FeedForwardShape:
    """The model's fields that a feed-forward layer reads.

    Attributes:
        d_model: the width of the model.
        hidden_dim: the width of a dense layer.
        gated: whether the units are gated.
        activation: a key of `ACTIVATIONS`.
        n_layers: the layers of the model, for the first size of what they add.
    """

    d_model: int
    hidden_dim: int
    gated: bool
    activation: str
    n_layers: int

    def count_products(self, hidden: int) -> int:
        """Returns the sizes of the matrices of units of width `hidden`, together."""
        return self.d_model * hidden * (3 if self.gated else 2)

    def activate(self, products: jax.Array) -> jax.Array:
        """Returns the hidden numbers [..., F] of the products [..., 2F] of values and gates; of [..., F] without
        gates."""
        form = ACTIVATIONS[self.activation]
        if not self.gated:
            return form(products)
        values, gates = jnp.split(products, 2, axis=-1)
        return values * form(gates)


class Routing(NamedTuple):
    """The choices of a router, each number as the share that these tokens have in it. It has no gradient.

    Where a device is told apart from others, it has a part of the tokens, and the sum over the parts is the whole.

    Attributes:
        load_E: the share of the tokens that chose each expert, float32. The loads of all experts have the sum `top_k`.
        score_E: the mean score of each expert, float32. The scores of a token are divided by their sum.
    """

    load_E: jax.Array
    score_E: jax.Array


class RoutedPart(nnx.Module, abc.ABC):
    """The part of a feed-forward layer whose matrices depend on the token."""

    def __call__(self, x_BxLxD: jax.Array, dense_BxLxD: jax.Array | None) -> jax.Array:
        """Returns the output of the layer from its input, and from the output of the dense part, if there is one.

        The tokens may be one axis, [B·L, D].
        """
        return self.compute(x_BxLxD, dense_BxLxD)[0]

    @abc.abstractmethod
    def compute(self, x_BxLxD: jax.Array, dense_BxLxD: jax.Array | None) -> tuple[jax.Array, Routing]:
        """Returns the output like `__call__`, and the choices of the router."""


class FeedForward(Configurable, abc.ABC):
    """Base of the configurations (frozen dataclasses made by `@configurable`)."""

    @abc.abstractmethod
    def dense_dim(self, shape: FeedForwardShape) -> int:
        """Returns the width of the dense part; 0: there is none."""

    @abc.abstractmethod
    def build(self, shape: FeedForwardShape, rngs: nnx.Rngs, dtype: DTypeLike) -> RoutedPart | None:
        """Returns the routed part of one layer; None: there is none."""

    @abc.abstractmethod
    def count_products(self, shape: FeedForwardShape) -> int:
        """Returns the sizes of the matrices that a token is multiplied with, together."""

    def settle(self, shape: FeedForwardShape) -> 'FeedForward':
        """Returns the layer with all sizes stated, and without what only training reads."""
        return self

    def portable(self, shape: FeedForwardShape) -> dict[str, object]:
        """Returns its fields as plain values, and `dense_dim`, for programs that do not read gin."""
        return {**dataclasses.asdict(self.settle(shape)), 'dense_dim': self.dense_dim(shape)}

    def count_experts(self) -> int:
        """Returns the number of experts that its router chooses from; 0: there is no router."""
        return 0

    def why_untrained(self) -> str | None:
        """Returns why training gives its router no gradient, and the remedy; None: it learns, or there is none."""
        return None

    def count_idle(self, shape: FeedForwardShape) -> int:
        """Returns the number of parameters that a token does not use."""
        return 0
