"""Other ways to compute the operation of the featured mechanism, which `lm bench attention` compares with ours.

Each is a function of the layer's call of `lm.ops.linear_attention`. The call holds sketches of queries and keys,
values, the normalized vectors for the exact weights, and options. The block must divide the length.

- plain: the formulas of PolySketchFormer §3, literally. - loop: the same formulas block by block, as one would write
them by hand: a `lax.scan` of a `jax.checkpoint`. - scan: our blocks, all at once, with an associative scan over their
sums.
"""

from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from lm.bench.candidates import featured
from lm.ops.linear_attention import LOCAL_BLOCK, LinearCall, PolynomialKernel, xla
from lm.ops.linear_attention.block import (
    BlockInputs,
    BlockKeys,
    BlockQueries,
    Shape,
    fold,
    group,
    move_tokens_last,
    read,
    ungroup,
)
from lm.ops.linear_attention.reference import plain_blocks
from lm.ops.linear_attention.types import Parameters

TOKENS = ('q_BxLxHxE', 'k_BxLxKxE', 'v_BxLxKxD', 'q_local_BxLxHxC', 'k_local_BxLxKxC', 'log_decay_BxLxK')
"""The arrays of a call that have one entry per token."""


def plain(call: LinearCall) -> jax.Array:
    """Returns [B, L, H, D]."""
    block, degree = _exact_kernel(call)
    return plain_blocks(*_tokens(call), degree=degree, block=block, denominator_bias=call.options.denominator_bias)


def loop(call: LinearCall) -> jax.Array:
    """Returns [B, L, H, D]. Keeps the sums of all blocks, and no features."""
    arrays = _tokens(call)
    batch, length, heads, values = call.v_BxLxKxD.shape
    (block, degree), bias = _exact_kernel(call), call.options.denominator_bias

    @jax.checkpoint
    def step(sums_BxHxRxRxD, tokens):
        x, y, v, q, k = tokens
        v1 = jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1)
        weights = jnp.tril(jnp.einsum('bthc,bshc->bhts', q, k) ** degree)
        near = jnp.einsum('bhts,bshd->bthd', weights, v1)
        total = near + jnp.einsum('bthi,bthj,bhijd->bthd', x, x, sums_BxHxRxRxD)
        sums_BxHxRxRxD += jnp.einsum('bthi,bthj,bthd->bhijd', y, y, v1)
        return sums_BxHxRxRxD, total[..., :-1] / (bias + total[..., -1:])

    size = arrays[0].shape[-1]
    none = jnp.zeros((batch, heads, size, size, values + 1), jnp.float32)
    blocks = tuple(a.reshape(batch, length // block, block, *a.shape[2:]).swapaxes(0, 1) for a in arrays)
    return lax.scan(step, none, blocks)[1].swapaxes(0, 1).reshape(arrays[2].shape)


def scan(call: LinearCall) -> jax.Array:
    """Returns [B, L, H, D]. JAX differentiates it and keeps the sums of all blocks."""
    q_BxLxHxE, k_BxLxHxE, v_BxLxHxD, q_local_BxLxHxC, k_local_BxLxHxC = _tokens(call)
    batch, length, heads, _ = v_BxLxHxD.shape
    block, _ = _exact_kernel(call)
    blocks = length // block
    shape = Shape(call.options, xla.TILE['cpu'], True, v_BxLxHxD.dtype)

    def cut(x):
        return x.reshape(batch * blocks, block, *x.shape[2:])

    def earlier(sums):
        each = sums.reshape(batch, blocks, *sums.shape[1:])
        return (lax.associative_scan(jnp.add, each, axis=1) - each).reshape(sums.shape)

    queries = BlockQueries(*(group(cut(x), heads) for x in (q_BxLxHxE, q_local_BxLxHxC)))
    keys = BlockKeys(*(move_tokens_last(cut(x)) for x in (k_BxLxHxE, v_BxLxHxD, k_local_BxLxHxC)))
    sums = jax.tree.map(earlier, fold(shape, keys.folded, None, None, 0))
    num, den = read(shape, BlockInputs(queries, keys, Parameters(None, None), sums, None, 0, None))
    return ungroup(num / den[:, :, None]).reshape(v_BxLxHxD.shape).astype(v_BxLxHxD.dtype)


def _tokens(call: LinearCall) -> list[jax.Array]:
    """Returns the arrays of a call without decay."""
    arrays = (getattr(call, name) for name in TOKENS)
    return [x for x in arrays if x is not None]


def _exact_kernel(call: LinearCall) -> tuple[int, int]:
    """Returns the tokens per block and the degree of the exact weights."""
    degree = cast(PolynomialKernel, call.options.local).degree
    return min(call.options.block or LOCAL_BLOCK, call.q_BxLxHxE.shape[1]), degree


FORMULATIONS: dict[str, Callable[[LinearCall], jax.Array]] = {'plain': plain, 'loop': loop, 'scan': scan}


def computed_mechanisms() -> dict[str, str]:
    """Returns formulation → gin name of the mechanism that it computes."""
    return dict.fromkeys(FORMULATIONS, featured())
