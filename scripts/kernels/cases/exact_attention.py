"""Softmax attention, in our kernels and in JAX's splash attention, and polynomial attention."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from lm.attention import HeadDims
from lm.ops.exact_attention import polynomial_attention, softmax_attention
from lm.ops.exact_attention.tpu import plan, splash
from lm.ops.exact_attention.tpu.pairs import Window
from scripts.kernels.cases.base import Case, KernelCall

WINDOW = 1024


def cases() -> dict[str, Case]:
    softmax = functools.partial(softmax_attention, implementation='pallas_tpu')
    polynomial = functools.partial(polynomial_attention, degree=4, implementation='pallas_tpu')
    near = functools.partial(softmax, window=WINDOW)
    return dict(softmax=functools.partial(flash_call, softmax), splash=splash_call) | {
        'polynomial p=4': functools.partial(flash_call, polynomial),
        f'softmax window={WINDOW}': functools.partial(flash_call, near, window=WINDOW),
    }


def flash_call(
    function: Callable[..., jax.Array], dims: HeadDims, length: int, window: int | None = None
) -> KernelCall:
    """Returns a call of the kernels in `lm.ops.exact_attention.tpu.flash`.

    A grid step takes one block of queries and one block of keys.

    Args:
        function: a function of queries, keys and values [B, L, H, D].
        dims: the heads.
        length: L.
        window: keys that a query sees; None: all before it.
    """
    x = jax.ShapeDtypeStruct((1, length, dims.n_heads, dims.head_dim), jnp.bfloat16)
    block = plan.block_size(length)
    blocks = length // block
    back = blocks if window is None else Window(window, block).back
    tokens = length / sum(min(i, back) + 1 for i in range(blocks))
    steps = {(kernel, f'flash_attention_{kernel}'): tokens for kernel in ('forward', 'backward')}
    return KernelCall(function, (x, x, x), steps, skips=True)


def splash_call(dims: HeadDims, length: int) -> KernelCall:
    """Returns a call of JAX's kernels. A grid step takes one block of queries and one block of keys."""
    x = jax.ShapeDtypeStruct((1, length, dims.n_heads, dims.head_dim), jnp.bfloat16)
    block, _, key_block = splash.blocks(length, dims.head_dim * x.dtype.itemsize)
    tokens = length / sum(start // key_block + 1 for start in range(0, length, block))
    kernels = [('forward', 'splash_mha_fwd'), ('backward', 'splash_mha_dkv')]
    if not splash.is_fused(jax.ShapeDtypeStruct((1, dims.n_heads, length, dims.head_dim), x.dtype), key_block):
        kernels.append(('backward', 'splash_mha_dq'))
    function = functools.partial(softmax_attention, implementation='splash')
    return KernelCall(function, (x, x, x), dict.fromkeys(kernels, tokens), skips=True)
