"""The matrices of a feed-forward layer: linear units that all tokens pass, experts, or both."""

from lm.model.dense import Dense
from lm.model.feed_forward.base import RoutedPart
from lm.model.parts.maker import Maker


def make_units_in(maker: Maker) -> Dense | None:
    shape, hidden = maker.shape, maker.feed_forward.dense_dim(maker.shape)
    sizes = (hidden, hidden) if shape.gated else (hidden,)
    return maker.linear(shape.d_model, sizes, 'embed', 'mlp', part='glu') if hidden else None


def make_units_out(maker: Maker) -> Dense | None:
    hidden, sizes = maker.feed_forward.dense_dim(maker.shape), (maker.shape.d_model,)
    return maker.linear(hidden, sizes, 'mlp', 'embed', part='glu', is_last=True) if hidden else None


def make_experts(maker: Maker) -> RoutedPart | None:
    return maker.feed_forward.build(maker.shape, maker.rngs, maker.dtype)
