#!/usr/bin/env python3
"""`lm bench` with one more mechanism, `identity`, which returns the values: the line "X" of Figs. 1, 14 and 15.

    python configs/papers/performer/figure_1/identity.py step --mechanisms softmax,performer,identity --contexts 512

No attention is faster, so the distance to it is what attention costs.
"""

import sys

import jax.numpy as jnp
from flax import nnx

from lm.attention.base import Attention, AttentionModule, HeadDims
from lm.cli import main
from lm.config.configurable import configurable
from lm.errors import ConfigError


@configurable('identity')
class Identity(Attention):
    """No token sees another one."""

    def build(self, dims: HeadDims, rngs: nnx.Rngs) -> 'IdentityAttention':
        return IdentityAttention(dims)

    def flops_per_token(self, dims: HeadDims, length: int) -> float:
        return 0.0

    def why_causal(self) -> None:
        return None


class IdentityAttention(AttentionModule):
    """Returns the values of each head."""

    def __init__(self, dims: HeadDims):
        self.dims = dims

    def mix(self, q_BxLxHxD, k_BxLxKxD, v_BxLxKxD, *, starts_BxL=None):
        return jnp.repeat(v_BxLxKxD, self.dims.n_heads // self.dims.n_kv_heads, axis=2)

    def init_state(self, batch, max_length, dtype, documents=False):
        raise ConfigError('identity: is for benchmarks, and generates nothing')

    def decode_step(self, state, q_BxTxHxD, k_BxTxKxD, v_BxTxKxD, *, starts_BxT=None):
        raise ConfigError('identity: is for benchmarks, and generates nothing')


if __name__ == '__main__':
    sys.exit(main(['bench', *sys.argv[1:]]))
