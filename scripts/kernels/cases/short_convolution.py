"""Short convolutions of queries, keys and values."""

import functools

import jax
import jax.numpy as jnp

from lm.attention import HeadDims
from lm.ops.short_convolution import short_convolution
from lm.ops.short_convolution.tpu import block_sizes
from scripts.kernels.cases.base import Case, KernelCall

WIDTH = 4
"""Tokens, the most common choice (Mamba, Gated DeltaNet)."""


def cases() -> dict[str, Case]:
    return {'short convolution': convolution_call}


def convolution_call(dims: HeadDims, length: int) -> KernelCall:
    """Returns one call for all queries, keys and values, in bfloat16."""
    heads = dims.n_heads + 2 * dims.n_kv_heads
    x = jax.ShapeDtypeStruct((1, length, heads * dims.head_dim), jnp.bfloat16)
    kernel = jax.ShapeDtypeStruct((WIDTH, x.shape[-1]), jnp.float32)
    channels, tokens = block_sizes(x.shape[-1], length)
    work = tokens * dims.n_heads * channels / x.shape[-1]
    steps = {(name, f'short_convolution_{name}'): work for name in ('forward', 'backward')}
    return KernelCall(functools.partial(short_convolution, implementation='pallas_tpu'), (x, kernel), steps)
