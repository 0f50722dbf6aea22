"""Softmax attention on NVIDIA GPUs: cuDNN's flash attention through `jax.nn.dot_product_attention`."""

import re

import jax
import jax.numpy as jnp

from lm.ops import platform
from lm.ops.exact_attention.types import SoftmaxCall

RECENT = re.compile(r'([89]|\d\d+)\.\d+')
"""Compute capabilities for which cuDNN has it, from 8.0 (A100) on."""


def softmax_attention(call: SoftmaxCall) -> jax.Array:
    """Computes calls that `unsupported` does not refuse."""

    def attend(q, k, v):
        length = q.shape[1]
        # Gradients take an even number of tokens; one after the last is hidden from all others.
        q, k, v = (jnp.pad(x, ((0, 0), (0, length % 2), (0, 0), (0, 0))) for x in (q, k, v))
        o = jax.nn.dot_product_attention(
            q,
            k,
            v,
            scale=call.scale,
            is_causal=call.causal,
            local_window_size=None if call.window is None else (call.window - 1, 0),
            implementation='cudnn',
        )
        return o[:, :length]

    return platform.per_device(attend, split=(True, True, True))(call.q_BxLxHxD, call.k_BxMxKxD, call.v_BxMxKxD)


def unsupported(call: SoftmaxCall) -> str | None:
    """Returns why cuDNN cannot compute this call, or None."""
    q, k, v = call.q_BxLxHxD, call.k_BxMxKxD, call.v_BxMxKxD
    if platform.target_platform() != 'gpu':
        return 'needs an NVIDIA GPU'
    if (capability := _compute_capability()) is not None and not RECENT.fullmatch(capability):
        return f'needs an NVIDIA GPU of compute capability 8 (A100, L4) or later, not {capability}'
    if q.dtype not in (jnp.bfloat16, jnp.float16) or not q.dtype == k.dtype == v.dtype:
        return f'computes in bfloat16 or float16, not {q.dtype}'
    if q.shape[-1] % 8 or q.shape[-1] > 128 or q.shape[-1] != v.shape[-1]:
        return f'takes head sizes that are multiples of 8 up to 128, not {q.shape[-1]}'
    if call.log_decay_BxMxK is not None:
        return 'has no decay'
    if call.sinks_H is not None:
        return 'has no sinks'
    if call.score_cap is not None:
        return 'has no cap of the scores'
    if not call.is_whole:
        return 'takes as many queries as keys'
    if call.starts_BxL is not None:
        return 'cannot tell documents apart'
    if call.window is not None and not call.causal:
        return 'takes a window only with the causal mask'
    if q.shape[1] % 2 and not call.causal:
        return f'takes an odd number of tokens, {q.shape[1]}, only with the causal mask'
    return platform.uneven_batch(q.shape[0])


def _compute_capability() -> str | None:
    """Returns the capability of this machine's GPUs: '7.5', or AMD's 'gfx942'.

    None where there are no GPUs, and programs are for others.
    """
    try:
        return getattr(jax.local_devices(backend='gpu')[0], 'compute_capability', None)
    except RuntimeError:
        return None
