"""LayerScale: a learned gain of each channel on each residual branch (Touvron et al. 2021, "Going deeper with image
transformers", §2)."""

import jax
import jax.numpy as jnp
from flax import nnx

from lm.attention.branches.base import BranchPart
from lm.config.configurable import configurable, field
from lm.parameters import declare


@configurable('layer_scale')
class LayerScale(BranchPart):
    """x += gain · branch(x)."""

    start: float = field(default=0.1, above=0, maximum=1, help='first gain: 0.1 up to 18 layers, 1e-5 up to 24')

    def build(self, width: int, rngs: nnx.Rngs) -> nnx.Module:
        return ChannelGains(width, self.start)


class ChannelGains(nnx.Module):
    """The gains of one branch."""

    def __init__(self, width: int, start: float):
        self.gain = nnx.Param(jnp.full(width, start), **declare('gain', 'embed', part='norms'))

    def __call__(self, x_TxD: jax.Array) -> jax.Array:
        return x_TxD * self.gain[...].astype(x_TxD.dtype)
