"""The triangular systems of the delta rule on Hopper GPUs, each chunk's inverted and applied on chip.

    X = (I + A)⁻¹     A_ij = β_i ⟨k_i, k_j⟩ exp(t_i - t_j), j < i

Products alone compute it. Blocks of 8 are inverted by their powers, which stay small, and then joined in pairs. Let
X be the inverse of a pair's blocks on the diagonal, and C the block below it: the pair's inverse is X - X C X. Products
take two bfloat16 numbers per factor, 16 bits.

N key heads of all sequences, T chunks of CHUNK tokens, E key size, D value size. Keys and values are in *parts* of TILE
numbers.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops import platform
from lm.ops.dots import in_parts
from lm.ops.gpu import (
    FAST,
    TILE,
    load_columns,
    load_rows,
    matrix,
    number_entries,
    release,
    repeat_per_column,
    repeat_per_row,
    send,
    slice_tile,
    sum_products,
    wait_for_copies,
)

Ref = Any
"""A reference to an array in memory, inside a kernel."""
FIRST = 8
"""Powers of a larger block's A reach 10^18 where all keys are one."""


def solve(k_NxTxCxE, beta_NxTxC, t_NxTxC, v_NxTxCxD) -> list[jax.Array]:
    """Computes X diag(β) V and -X diag(β exp(t)) K, bfloat16 [N, T, C, D] and [N, T, C, E]; β and t are float32."""

    def pair(x, *, k_CxE, factors, beta_C, t_C, **_):
        beta = load_columns(beta_C)
        scales = beta, -beta * jnp.exp(load_columns(t_C))
        values, keys = (in_parts(x * repeat_per_column(scale, TILE), 2) for scale in scales)
        return [(values, factors[0]), (keys, k_CxE)]

    return _call('solutions', pair, k_NxTxCxE, beta_NxTxC, t_NxTxC, [v_NxTxCxD])


def solve_transposed(k_NxTxCxE, beta_NxTxC, t_NxTxC, dnew_NxTxCxD, dseen_NxTxCxE) -> list[jax.Array]:
    """Computes Xᵀ times the gradients of both solutions, in their shapes; arguments as in `solve`."""

    def pair(x, *, factors, high, low, **_):
        inverse = turn(x, high, low)
        return [(inverse, d) for d in factors]

    return _call('gradients', pair, k_NxTxCxE, beta_NxTxC, t_NxTxC, [dnew_NxTxCxD, dseen_NxTxCxE])


def turn(x: jax.Array, high: Ref, low: Ref) -> list[Ref]:
    """Places the two bfloat16 numbers of X in shared memory, and returns Xᵀ."""
    release()
    high[...], low[...] = in_parts(x, 2)
    plgpu.commit_smem()
    return [part.transpose((1, 0)) for part in (high, low)]


def send_products(
    results: list[tuple[Sequence[Ref], list[Ref]]], staging: list[Ref], out: list[Ref], register: list[Ref]
) -> None:
    """Sends each result to its matrix in memory, one part of each of them at the same time.

    Args:
        results: the factors of each result. The first are the two bfloat16 numbers of X, or of Xᵀ, or of X with
            factors per column; the second are the parts of the other matrix, in shared memory.
        staging: where a part of each result is placed.
        out: the matrices.
        register: scratch of `multiply`.
    """
    for part in range(max(len(parts) for _, parts in results)):
        wait_for_copies()
        release()
        wide = [number for number, (_, parts) in enumerate(results) if part < len(parts)]
        pairs = [[(x, results[number][1][part]) for x in results[number][0]] for number in wide]
        for number, value in zip(wide, sum_products(*pairs, scratch=register), strict=True):
            send(value, staging[number], out[number].at[:, slice_tile(part)])


def _call(name: str, pair: Callable, k, beta, t, factors: list[jax.Array]) -> list[jax.Array]:
    """Runs the kernel: `pair` takes the inverse and what is in shared memory, and returns what `send_products` takes.

    There are the parts of keys `k_CxE` and of each of the other `factors`, which arrive at `ready`; and `beta_C` and
    `t_C`, float32, which arrive at `tokens_ready`. `high` and `low` are for the two bfloat16 parts of an operand.
    """
    n, chunks = k.shape[:2]
    interpreted = platform.target_platform() != 'gpu'

    def body(k, beta, t, factors, out, /, *, ready, tokens_ready, staging, register, **tokens):
        chunk, head = lax.axis_index('chunk'), lax.axis_index('head')
        for source, parts in zip((k, *factors), (tokens['k_CxE'], *tokens['factors']), strict=True):
            for part, to in enumerate(parts):
                plgpu.copy_gmem_to_smem(source.at[head, chunk, :, slice_tile(part)], to, ready)
        for source, to in ((beta, tokens['beta_C']), (t, tokens['t_C'])):
            plgpu.copy_gmem_to_smem(source.at[head, chunk], to, tokens_ready)
        plgpu.barrier_wait(ready)
        plgpu.barrier_wait(tokens_ready)

        a = _make_system(tokens['k_CxE'], tokens['beta_C'], tokens['t_C'])
        x = invert(a, functools.partial(multiply_split, tokens['high'], tokens['low'], register))
        send_products(pair(x, **tokens), staging, [to.at[head, chunk] for to in out], register)
        plgpu.wait_smem_to_gmem(0)

    body.__name__ = f'delta_rule_{name}'
    tile, tokens = matrix(TILE, TILE), plgpu.SMEM((TILE,), jnp.float32)
    parts = [[tile] * (array.shape[3] // TILE) for array in (k, *factors)]
    (results,) = plgpu.kernel(
        body,
        out_type=([jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in (factors[0], k)],),
        grid=(chunks, n),
        grid_names=('chunk', 'head'),
        compiler_params=FAST,
        scratch_types={
            'k_CxE': parts[0],
            'factors': parts[1:],
            'ready': plgpu.Barrier(num_arrivals=sum(map(len, parts))),
            'beta_C': tokens,
            't_C': tokens,
            'tokens_ready': plgpu.Barrier(num_arrivals=2),
            'high': tile,
            'low': tile,
            'staging': [tile, tile],
            'register': [tile] if interpreted else [],
        },
    )(k, beta, t, factors)
    return results


def multiply_split(high: Ref, low: Ref, register: list[Ref], a: jax.Array, b: jax.Array) -> jax.Array:
    """Computes a · b of float32 [C, C] in registers; the two bfloat16 numbers of b are placed in shared memory."""
    release()
    high[...], low[...] = in_parts(b, 2)
    plgpu.commit_smem()
    a_high, a_low = in_parts(a, 2)
    return sum_products([(a_high, high), (a_high, low), (a_low, high)], scratch=register)[0]


def _make_system(k_CxE: list[Ref], beta_C: Ref, t_C: Ref) -> jax.Array:
    """Makes A, float32 in registers."""
    t_rows = repeat_per_row(load_rows(t_C), TILE)
    (products,) = sum_products([(k, k.transpose((1, 0))) for k in k_CxE])
    products *= repeat_per_row(load_rows(beta_C), TILE)
    later = t_rows - repeat_per_column(load_columns(t_C), TILE)
    row, column = number_entries()
    return jnp.where(column < row, products * jnp.exp(jnp.minimum(later, 0.0)), 0.0)


def invert(a: jax.Array, multiply: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    """Computes (I + A)⁻¹ of [C, C] in registers."""
    row, column = number_entries()

    def inside(size):
        return row // size == column // size

    blocks = jnp.where(inside(FIRST), a, 0.0)
    square = multiply(blocks, blocks)
    x = jnp.where(row == column, 1.0, 0.0) - blocks
    x = x + multiply(x, square)
    x = x + multiply(x, multiply(square, square))
    joined = FIRST
    while joined < TILE:
        joined *= 2
        below = jnp.where(inside(joined // 2), 0.0, jnp.where(inside(joined), a, 0.0))
        x = x - multiply(multiply(x, below), x)
    return x
