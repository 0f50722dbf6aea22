"""Rotary positions of queries and keys, with normalizations and without."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from lm.attention import HeadDims
from lm.ops.rotary import HeadNorms, RootNorms, Rotation, rotate
from lm.ops.rotary.tpu import block_size
from scripts.kernels.cases.base import Case, KernelCall, Steps


def cases() -> dict[str, Case]:
    return {
        'rotary': functools.partial(rotary_call, None),
        'rotary and layer norms': functools.partial(rotary_call, HeadNorms),
        'rotary and RMS norms': functools.partial(rotary_call, RootNorms),
    }


def rotary_call(normed: type | None, dims: HeadDims, length: int) -> KernelCall:
    """Returns a call that rotates queries and keys, with normalizations of a type. A grid step takes all heads."""
    heads = dims.n_heads + dims.n_kv_heads
    qk = jax.ShapeDtypeStruct((1, length, heads, dims.head_dim), jnp.bfloat16)
    angles = jax.ShapeDtypeStruct((length, 1, dims.head_dim // 2), jnp.float32)
    gain: Any = jax.ShapeDtypeStruct((dims.head_dim,), jnp.float32)
    norms = HeadNorms(gain, gain, gain, gain) if normed is HeadNorms else None
    roots = RootNorms(gain, gain, 1e-5) if normed is RootNorms else None

    def function(qk, cos, sin, norms, roots):
        return rotate(qk, Rotation(cos, sin), dims.n_heads, norms, roots, implementation='pallas_tpu')

    tokens = block_size(length, heads, dims.head_dim) * dims.n_heads
    steps: Steps = {(kernel, f'rotary_{kernel}'): tokens for kernel in ('forward', 'backward')}
    return KernelCall(function, (qk, angles, angles, norms, roots), steps)
