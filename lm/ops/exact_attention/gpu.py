"""Polynomial attention on Hopper GPUs: the kernels of linear attention, whose exact block is the whole window."""

import jax

from lm.ops.exact_attention.masks import beyond_causal
from lm.ops.linear_attention.gpu import attention
from lm.ops.linear_attention.types import SQUARE, Options, PolynomialKernel


def polynomial_attention(
    q_BxLxHxD, k_BxLxKxD, v_BxLxKxD, *, degree, denominator_bias=1.0, scale=1.0, **rest
) -> jax.Array:
    """Arguments as in `lm.ops.exact_attention`; calls that `unsupported` refuses are wrong here."""
    options = _options(q_BxLxHxD, degree, denominator_bias, scale)
    arrays = _arrays(q_BxLxHxD, k_BxLxKxD, v_BxLxKxD)
    return attention.linear_attention(*arrays, options=options, with_state=False)[0]


def unsupported(q, k, v, *, degree, denominator_bias=1.0, scale=1.0, block=None, starts=None, **visible) -> str | None:
    """Why the kernels cannot compute this call, or None."""
    if reason := beyond_causal(q, k, **visible):
        return reason
    if starts is not None:
        return 'cannot tell documents apart'
    options = _options(q, degree, denominator_bias, scale)
    return attention.unsupported(*_arrays(q, k, v), options=options)


def _options(q: jax.Array, degree: int, denominator_bias: float, scale: float) -> Options:
    local = PolynomialKernel(degree, scale)
    return Options(SQUARE, local=local, block=attention.one_block(q.shape[1]), denominator_bias=denominator_bias)


def _arrays(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple:
    """Of linear attention: what is compared stands for features, too, which one block has no use for."""
    return q, k, v, None, None, q, k, None
