"""The triangular systems of the delta rule on Hopper GPUs, each chunk's inverted and applied on chip.

    X = (I + A)⁻¹     A_ij = β_i ⟨k_i, k_j⟩ exp(t_i - t_j), j < i

by products alone: blocks of 8 by their powers, which stay small, then blocks joined in pairs: with X the inverse of the
blocks on the diagonal and C what stands below it in a pair, that of the pair is X - X C X. Products are of two bfloat16
numbers a factor, 16 bits.

N key heads of all sequences, T chunks of CHUNK tokens, E key size, D value size, both CHUNK.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops import platform
from lm.ops.gpu import (
    TILE,
    by_column,
    by_row,
    load_columns,
    load_rows,
    matrix,
    product,
    release,
    send,
    together,
)

FIRST = 8
"""Powers of a larger block's A reach 10^18 where all keys are one."""


def solutions(k, beta, t, v) -> list[jax.Array]:
    """X diag(β) V and -X diag(β exp(t)) K, bfloat16 [N, T, C, D] and [N, T, C, E].

    Args:
        k: [N, T, C, E] bfloat16.
        beta: [N, T, C] float32.
        t: the sums of the logs of a chunk's tokens, [N, T, C] float32.
        v: [N, T, C, D] bfloat16.
    """

    def apply(x, k_CxE, beta_C, t_C, v_CxD):
        beta = load_columns(beta_C)
        factors = beta, -beta * jnp.exp(load_columns(t_C))
        parts = [_two(x * by_column(factor, TILE)) for factor in factors]
        return [[(part, b) for part in two] for two, b in zip(parts, (v_CxD, k_CxE), strict=True)]

    return _call('solutions', apply, k, beta, t, v)


def gradients(k, beta, t, du, dw) -> list[jax.Array]:
    """Xᵀ of the gradients of both solutions, in their shapes; arguments as in `solutions`."""

    def apply(x, k_CxE, beta_C, t_C, du_CxD, dw_CxE, high, low):
        release()
        high[...], low[...] = _two(x)
        plgpu.commit_smem()
        return [[(part.transpose((1, 0)), d) for part in (high, low)] for d in (du_CxD, dw_CxE)]

    return _call('gradients', apply, k, beta, t, du, dw)


def _call(name: str, apply, k, beta, t, *factors) -> list[jax.Array]:
    n, chunks, _, size = k.shape
    interpreted = platform.target_platform() != 'gpu'

    def body(k, beta, t, *refs):
        *refs, (k_CxE, factors_smem, ready), (beta_C, t_C, tokens_ready), (high, low), out_smem, register = refs
        factors, out = refs[: len(factors_smem)], refs[len(factors_smem) :]
        chunk, head = lax.axis_index('chunk'), lax.axis_index('head')
        for source, to in zip((k, *factors), (k_CxE, *factors_smem), strict=True):
            plgpu.copy_gmem_to_smem(source.at[head, chunk], to, ready)
        for source, to in ((beta, beta_C), (t, t_C)):
            plgpu.copy_gmem_to_smem(source.at[head, chunk], to, tokens_ready)
        plgpu.barrier_wait(ready)
        plgpu.barrier_wait(tokens_ready)

        def multiplied(a, b):
            """a · b of float32 [C, C] in registers."""
            release()
            high[...], low[...] = _two(b)
            plgpu.commit_smem()
            a_high, a_low = _two(a)
            return together([(a_high, high), (a_high, low), (a_low, high)], spare=register)[0]

        x = _inverse(_system(k_CxE, beta_C, t_C), multiplied)
        more = (high, low) if name == 'gradients' else ()
        pairs = apply(x, k_CxE, beta_C, t_C, *factors_smem, *more)
        for value, staging, to in zip(together(*pairs, spare=register), out_smem, out, strict=True):
            send(value, staging, to.at[head, chunk])
        plgpu.wait_smem_to_gmem(0)

    body.__name__ = f'delta_rule_{name}'
    tile = matrix(TILE, size)
    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(k.shape, jnp.bfloat16)] * 2,
        grid=(chunks, n),
        grid_names=('chunk', 'head'),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        scratch_types=[
            [tile, [tile] * len(factors), plgpu.Barrier(num_arrivals=1 + len(factors))],
            [plgpu.SMEM((TILE,), jnp.float32)] * 2 + [plgpu.Barrier(num_arrivals=2)],
            [tile, tile],
            [tile, tile],
            [tile] if interpreted else [],
        ],
    )(k, beta, t, *factors)


def _two(x: jax.Array) -> list[jax.Array]:
    """Two bfloat16 arrays whose sum is x to 16 bits."""
    high = x.astype(jnp.bfloat16)
    return [high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)]


def _system(k_CxE, beta_C, t_C) -> jax.Array:
    """A, float32 in registers."""
    t_rows = by_row(load_rows(t_C), TILE)
    met = product(k_CxE, k_CxE.transpose((1, 0))) * by_row(load_rows(beta_C), TILE)
    later = t_rows - by_column(load_columns(t_C), TILE)
    row, column = _index()
    return jnp.where(column < row, met * jnp.exp(jnp.minimum(later, 0.0)), 0.0)


def _index() -> list[jax.Array]:
    """Rows and columns."""
    layout = plgpu.Layout.WGMMA
    return [plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), axis, layout=layout) for axis in (0, 1)]


def _inverse(a: jax.Array, multiplied) -> jax.Array:
    """(I + A)⁻¹ of [C, C] in registers."""
    row, column = _index()

    def inside(size):
        return row // size == column // size

    blocks = jnp.where(inside(FIRST), a, 0.0)
    square = multiplied(blocks, blocks)
    x = jnp.where(row == column, 1.0, 0.0) - blocks
    x = x + multiplied(x, square)
    x = x + multiplied(x, multiplied(square, square))
    joined = FIRST
    while joined < TILE:
        joined *= 2
        below = jnp.where(inside(joined // 2), 0.0, jnp.where(inside(joined), a, 0.0))
        x = x - multiplied(multiplied(x, below), x)
    return x
