"""The maker of a layer's parameters, which each part asks for its own."""

import dataclasses

from flax import nnx
from jax.typing import DTypeLike

from lm.attention import Attention
from lm.model.config import ModelConfig
from lm.model.dense import Dense
from lm.model.feed_forward import FeedForward, FeedForwardShape
from lm.model.options import ResolvedLayer
from lm.parameters import NORMS, declare, rms_norm


@dataclasses.dataclass(frozen=True)
class Maker:
    """Makes parameters of one layer; each draws its random numbers in turn."""

    config: ModelConfig
    attention: Attention
    feed_forward: FeedForward
    rngs: nnx.Rngs
    dtype: DTypeLike

    @property
    def options(self) -> ResolvedLayer:
        return self.config.resolve(self.attention)

    @property
    def shape(self) -> FeedForwardShape:
        return self.config.feed_forward_shape

    def linear(
        self, n_in: int, sizes: tuple[int, ...], *axes: str, part: str, is_last: bool = False, biased: bool = False
    ) -> Dense:
        """Returns a linear map to numbers of `sizes`, side by side.

        Args:
            axes: the meaning of rows and of columns.
            part: the part of the model that it belongs to.
            is_last: its products are added to the residual stream. They start smaller in deeper models, so that the sum
                over layers has unit scale (GPT-2 §2.3).
            biased: it has biases even if the other maps of the model have none.
        """
        init = nnx.initializers.lecun_normal()
        if is_last:
            init = nnx.initializers.variance_scaling(1 / (2 * self.config.n_layers), 'fan_in', 'truncated_normal')
        biased = biased or self.config.biases
        return Dense(
            n_in,
            sum(sizes),
            use_bias=biased,
            dtype=self.dtype,
            kernel_init=init,
            rngs=self.rngs,
            kernel_metadata=declare('matrix', *axes, part=part, pieces=sizes),
            bias_metadata=declare('bias', axes[-1], part=part) if biased else {},
        )

    def norm(self) -> nnx.Module:
        """Returns a normalization of the residual stream."""
        options = {'dtype': self.dtype, 'epsilon': self.config.norm_epsilon}
        return NORMS[self.config.norm](self.config.d_model, 'embed', self.rngs, part='norms', **options)

    def rms_norm(self, size: int, axis: str) -> nnx.RMSNorm:
        """Returns a normalization inside attention."""
        options = {'dtype': self.dtype, 'epsilon': self.config.norm_epsilon}
        return rms_norm(size, axis, self.rngs, part='attention', **options)
