"""Polynomial attention on Hopper GPUs: the kernels of linear attention, whose exact block is the whole window."""

import jax

from lm.ops.exact_attention.types import PolynomialCall
from lm.ops.linear_attention.gpu import attention
from lm.ops.linear_attention.types import SQUARE, Options, PolynomialKernel


def polynomial_attention(call: PolynomialCall) -> jax.Array:
    """Computes calls that `unsupported` does not refuse."""
    return attention.linear_attention(*_arrays(call), options=_options(call), with_state=False)[0]


def unsupported(call: PolynomialCall) -> str | None:
    """Returns why the kernels cannot compute this call, or None."""
    if reason := call.beyond_causal():
        return reason
    if call.starts_BxL is not None:
        return 'cannot tell documents apart'
    return attention.unsupported(*_arrays(call), options=_options(call))


def _options(call: PolynomialCall) -> Options:
    local, block = PolynomialKernel(call.degree, call.scale), attention.one_block(call.q_BxLxHxD.shape[1])
    return Options(SQUARE, local=local, block=block, denominator_bias=call.denominator_bias)


def _arrays(call: PolynomialCall) -> tuple:
    """The arrays of linear attention. Queries and keys also stand for features, which a single block does not use."""
    q, k = call.q_BxLxHxD, call.k_BxMxKxD
    return q, k, call.v_BxMxKxD, None, None, q, k, None
