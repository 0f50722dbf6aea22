"""The causal convolution of queries, keys and values."""

from lm.attention.recurrent.convolution import ShortConvolution
from lm.model.parts.maker import Maker


def make_convolution(maker: Maker) -> ShortConvolution | None:
    own = maker.options
    if own.convolution is None:
        return None
    return ShortConvolution(sum(own.qkv_sizes), own.convolution, maker.rngs, 'attention')
