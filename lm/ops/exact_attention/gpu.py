"""Polynomial attention on Hopper GPUs: the kernels of linear attention, whose exact block is the whole window."""

import jax

from lm.ops.exact_attention.types import PolynomialCall
from lm.ops.linear_attention.gpu import attention
from lm.ops.linear_attention.types import SQUARE, LinearCall, Options, PolynomialKernel


def polynomial_attention(call: PolynomialCall) -> jax.Array:
    """Computes calls that `unsupported` does not refuse."""
    return attention.linear_attention(_make_call(call)).o_BxLxHxD


def unsupported(call: PolynomialCall) -> str | None:
    """Returns why the kernels cannot compute this call, or None."""
    if reason := call.beyond_causal():
        return reason
    if call.starts_BxL is not None:
        return 'cannot tell documents apart'
    return attention.unsupported(_make_call(call))


def _make_call(call: PolynomialCall) -> LinearCall:
    """Makes the call of linear attention. Queries and keys stand for features, which a single block does not use."""
    q, k, length = call.q_BxLxHxD, call.k_BxMxKxD, call.q_BxLxHxD.shape[1]
    local, block = PolynomialKernel(call.degree, call.scale), attention.fit_block(length)
    options = Options(SQUARE, local=local, block=block, denominator_bias=call.denominator_bias)
    return LinearCall(q, k, call.v_BxMxKxD, q_local_BxLxHxC=q, k_local_BxLxKxC=k, options=options)
