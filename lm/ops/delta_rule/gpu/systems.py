"""The triangular systems of the delta rule on Hopper GPUs, each chunk's inverted and applied on chip.

    X = (I + A)⁻¹     A_ij = β_i ⟨k_i, k_j⟩ exp(t_i - t_j), j < i

Products alone compute it. Blocks of 8 are inverted by their powers, which stay small, and then joined in pairs. Let
X be the inverse of a pair's blocks on the diagonal, and C the block below it: the pair's inverse is X - X C X. Products
take two bfloat16 numbers per factor, 16 bits.

N key heads of all sequences, T chunks of CHUNK tokens, E key size, D value size. Keys and values are in *parts* of TILE
numbers.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops import platform
from lm.ops.gpu import (
    TILE,
    load_columns,
    load_rows,
    matrix,
    release,
    repeat_per_column,
    repeat_per_row,
    send,
    slice_tile,
    sum_products,
    wait_for_copies,
)

FIRST = 8
"""Powers of a larger block's A reach 10^18 where all keys are one."""


class ChunkMemory(NamedTuple):
    """Shared memory of a chunk.

    Attributes:
        k_CxE: the parts of keys.
        factors: the parts of each other array that the inverse is multiplied with.
        ready: the barrier of both.
        beta_C: float32.
        t_C: the sums of the logs of the chunk's tokens, float32.
        tokens_ready: the barrier of both.
        high: where an operand's first bfloat16 part is placed.
        low: where its second part is placed.
        out: where a part of each of the two results is placed.
        register: scratch of `multiply` for operands, where the kernel is interpreted; else an empty list.
    """

    k_CxE: list
    factors: list[list]
    ready: Any
    beta_C: Any
    t_C: Any
    tokens_ready: Any
    high: Any
    low: Any
    out: list
    register: list


def solve(k_NxTxCxE, beta_NxTxC, t_NxTxC, v_NxTxCxD) -> list[jax.Array]:
    """Computes X diag(β) V and -X diag(β exp(t)) K, bfloat16 [N, T, C, D] and [N, T, C, E]; β and t are float32."""

    def pair(x, memory: ChunkMemory):
        beta, (v_CxD,) = load_columns(memory.beta_C), memory.factors
        factors = beta, -beta * jnp.exp(load_columns(memory.t_C))
        values, keys = (split(x * repeat_per_column(factor, TILE)) for factor in factors)
        return [Factors(values, v_CxD), Factors(keys, memory.k_CxE)]

    return _call('solutions', pair, k_NxTxCxE, beta_NxTxC, t_NxTxC, [v_NxTxCxD])


def solve_transposed(k_NxTxCxE, beta_NxTxC, t_NxTxC, dnew_NxTxCxD, dseen_NxTxCxE) -> list[jax.Array]:
    """Computes Xᵀ times the gradients of both solutions, in their shapes; arguments as in `solve`."""

    def pair(x, memory: ChunkMemory):
        high, low = memory.high, memory.low
        release()
        high[...], low[...] = split(x)
        plgpu.commit_smem()
        inverse = [x.transpose((1, 0)) for x in (high, low)]
        return [Factors(inverse, d) for d in memory.factors]

    return _call('gradients', pair, k_NxTxCxE, beta_NxTxC, t_NxTxC, [dnew_NxTxCxD, dseen_NxTxCxE])


class Factors(NamedTuple):
    """The two factors of a result.

    Attributes:
        inverse: the two bfloat16 numbers of X, or of Xᵀ, or of X with factors per column.
        parts: the parts of the other matrix, in shared memory.
    """

    inverse: list
    parts: list


def send_products(results: list[Factors], staging: list, out: list, register: list) -> None:
    """Sends each result to its matrix in memory, one part of each of them at the same time."""
    for part in range(max(len(result.parts) for result in results)):
        wait_for_copies()
        release()
        wide = [number for number, result in enumerate(results) if part < len(result.parts)]
        pairs = [[(x, results[number].parts[part]) for x in results[number].inverse] for number in wide]
        for number, value in zip(wide, sum_products(*pairs, scratch=register), strict=True):
            send(value, staging[number], out[number].at[:, slice_tile(part)])


def _call(name: str, pair: Callable, k, beta, t, factors: list[jax.Array]) -> list[jax.Array]:
    """Runs the kernel: `pair` takes the inverse and the memory, and returns the `Factors` of each result."""
    n, chunks = k.shape[:2]
    interpreted = platform.target_platform() != 'gpu'

    def body(k, beta, t, factors, out, memory: ChunkMemory):
        chunk, head = lax.axis_index('chunk'), lax.axis_index('head')
        for source, parts in zip((k, *factors), (memory.k_CxE, *memory.factors), strict=True):
            for part, to in enumerate(parts):
                plgpu.copy_gmem_to_smem(source.at[head, chunk, :, slice_tile(part)], to, memory.ready)
        for source, to in ((beta, memory.beta_C), (t, memory.t_C)):
            plgpu.copy_gmem_to_smem(source.at[head, chunk], to, memory.tokens_ready)
        plgpu.barrier_wait(memory.ready)
        plgpu.barrier_wait(memory.tokens_ready)

        def multiply(a, b):
            """Computes a · b of float32 [C, C] in registers."""
            release()
            memory.high[...], memory.low[...] = split(b)
            plgpu.commit_smem()
            a_high, a_low = split(a)
            pairs = [(a_high, memory.high), (a_high, memory.low), (a_low, memory.high)]
            return sum_products(pairs, scratch=memory.register)[0]

        x = invert(_make_system(memory), multiply)
        send_products(pair(x, memory), memory.out, [to.at[head, chunk] for to in out], memory.register)
        plgpu.wait_smem_to_gmem(0)

    body.__name__ = f'delta_rule_{name}'
    tile, tokens = matrix(TILE, TILE), plgpu.SMEM((TILE,), jnp.float32)
    parts = [[tile] * (array.shape[3] // TILE) for array in (k, *factors)]
    (results,) = plgpu.kernel(
        body,
        out_type=([jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in (factors[0], k)],),
        grid=(chunks, n),
        grid_names=('chunk', 'head'),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        scratch_types=[
            ChunkMemory(
                parts[0],
                parts[1:],
                plgpu.Barrier(num_arrivals=sum(map(len, parts))),
                tokens,
                tokens,
                plgpu.Barrier(num_arrivals=2),
                tile,
                tile,
                [tile, tile],
                [tile] if interpreted else [],
            )
        ],
    )(k, beta, t, factors)
    return results


def split(x: jax.Array) -> list[jax.Array]:
    """Splits x into two bfloat16 arrays whose sum is x to 16 bits."""
    high = x.astype(jnp.bfloat16)
    return [high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)]


def _make_system(memory: ChunkMemory) -> jax.Array:
    """Makes A, float32 in registers."""
    t_rows = repeat_per_row(load_rows(memory.t_C), TILE)
    (products,) = sum_products([(k, k.transpose((1, 0))) for k in memory.k_CxE])
    products *= repeat_per_row(load_rows(memory.beta_C), TILE)
    later = t_rows - repeat_per_column(load_columns(memory.t_C), TILE)
    row, column = number_entries()
    return jnp.where(column < row, products * jnp.exp(jnp.minimum(later, 0.0)), 0.0)


def number_entries() -> list[jax.Array]:
    """Returns the numbers of rows and of columns, [C, C]."""
    layout = plgpu.Layout.WGMMA
    return [plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), axis, layout=layout) for axis in (0, 1)]


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
