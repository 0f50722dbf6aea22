"""The dense feed-forward layer: gated linear units, or a linear map, the activation and a linear map."""

from flax import nnx
from jax.typing import DTypeLike

from lm.config.configurable import configurable
from lm.model.feed_forward.base import FeedForward, FeedForwardShape


@configurable('dense')
class DenseLayer(FeedForward):
    """All tokens pass the same matrices. Fields of the model say how (`hidden_dim`, `gated`, `activation`)."""

    def dense_dim(self, shape: FeedForwardShape) -> int:
        return shape.hidden_dim

    def build(self, shape: FeedForwardShape, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        return None

    def count_products(self, shape: FeedForwardShape) -> int:
        return shape.count_products(shape.hidden_dim)
