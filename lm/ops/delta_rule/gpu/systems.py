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

    def pair(x, *, keys, factors, scalars, **_):
        beta_C, t_C = map(load_columns, scalars)
        scales = beta_C, -beta_C * jnp.exp(t_C)
        of_values, of_keys = (in_parts(x * repeat_per_column(scale, TILE), 2) for scale in scales)
        return [(of_values, factors[0]), (of_keys, keys)]

    tokens = k_NxTxCxE, [beta_NxTxC, t_NxTxC], [v_NxTxCxD]
    return solve_systems('delta_rule_solutions', *tokens, _locate, _make_system, pair)


def solve_transposed(k_NxTxCxE, beta_NxTxC, t_NxTxC, dnew_NxTxCxD, dseen_NxTxCxE) -> list[jax.Array]:
    """Computes Xᵀ times the gradients of both solutions, in their shapes; arguments as in `solve`."""
    tokens = k_NxTxCxE, [beta_NxTxC, t_NxTxC], [dnew_NxTxCxD, dseen_NxTxCxE]
    return solve_systems('delta_rule_gradients', *tokens, _locate, _make_system, pair_turned)


def _locate(head: jax.Array, chunk: jax.Array) -> tuple:
    return head, chunk, slice(None)


def pair_turned(x: jax.Array, *, factors, high: Ref, low: Ref, **_) -> list[tuple[Sequence[Ref], list[Ref]]]:
    """Places the two bfloat16 numbers of X in shared memory, and pairs Xᵀ with each of the factors."""
    release()
    high[...], low[...] = in_parts(x, 2)
    plgpu.commit_smem()
    return [([part.transpose((1, 0)) for part in (high, low)], d) for d in factors]


def send_products(results: list[tuple[Sequence[Ref], list[Ref]]], staging: list[Ref], out: list[Ref]) -> None:
    """Sends each result to its matrix in memory, one part of each of them at the same time.

    Args:
        results: the factors of each result. The first are the two bfloat16 numbers of X, or of Xᵀ, or of X with
            factors per column; the second are the parts of the other matrix, in shared memory.
        staging: where a part of each result is placed.
    """
    for part in range(max(len(parts) for _, parts in results)):
        wait_for_copies()
        release()
        wide = [number for number, (_, parts) in enumerate(results) if part < len(parts)]
        pairs = [[(x, results[number][1][part]) for x in results[number][0]] for number in wide]
        for number, value in zip(wide, sum_products(*pairs), strict=True):
            send(value, staging[number], out[number].at[:, slice_tile(part)])


def solve_systems(
    name: str,
    keys: Any,
    scalars: list[jax.Array],
    factors: list[jax.Array],
    locate: Callable[[jax.Array, jax.Array], tuple],
    make_system: Callable[..., jax.Array],
    pair: Callable,
    extra: Sequence[Ref] = (),
) -> list[jax.Array]:
    """Runs a kernel that inverts the system of each chunk, and applies the inverse X.

    Args:
        keys: the keys [N, …, E], bfloat16, alone or followed by what belongs to them.
        scalars: numbers of the tokens, float32.
        factors: arrays like keys, of which the first is like the first result.
        locate: (head, chunk) → the place of a chunk in an array.
        make_system: (parts of keys, scalars, *extra) → A.
        pair: takes X and, by name, what is in shared memory: the parts of `keys` and of each of the `factors`, the
            `scalars`, and `high` and `low` for two bfloat16 numbers. It returns what `send_products` takes.
    """
    k = jax.tree.leaves(keys)[0]
    n, key_size = k.shape[0], k.shape[-1]

    def body(keys, scalars, factors, out, /, *, ready, scalars_ready, staging, extra, **chunk):
        head = lax.axis_index('head')
        at = locate(head, lax.axis_index('chunk'))
        for source, parts in zip((keys, *factors), (chunk['keys'], *chunk['factors']), strict=True):
            for part, place in enumerate(parts):
                for x, to in zip(jax.tree.leaves(source), jax.tree.leaves(place), strict=True):
                    plgpu.copy_gmem_to_smem(x.at[(*at, slice_tile(part))], to, ready)
        for source, to in zip(scalars, chunk['scalars'], strict=True):
            plgpu.copy_gmem_to_smem(source.at[at], to, scalars_ready)
        plgpu.barrier_wait(ready)
        plgpu.barrier_wait(scalars_ready)
        a = make_system(chunk['keys'], chunk['scalars'], *extra)
        x = invert(a, functools.partial(multiply_split, chunk['high'], chunk['low']))
        send_products(pair(x, **chunk), staging, [to.at[at] for to in out])
        plgpu.wait_smem_to_gmem(0)

    body.__name__ = name
    tile = matrix(TILE, TILE)
    parts = [jax.tree.map(lambda _: tile, keys)] * (key_size // TILE)
    of_factors = [[tile] * (factor.shape[-1] // TILE) for factor in factors]
    (results,) = plgpu.kernel(
        body,
        out_type=([jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in (factors[0], k)],),
        grid=(k.size // (n * key_size * TILE), n),
        grid_names=('chunk', 'head'),
        compiler_params=FAST,
        scratch_types={
            'keys': parts,
            'factors': of_factors,
            'ready': plgpu.Barrier(num_arrivals=len(jax.tree.leaves((parts, of_factors)))),
            'scalars': [plgpu.SMEM((TILE,), jnp.float32) for _ in scalars],
            'scalars_ready': plgpu.Barrier(num_arrivals=len(scalars)),
            'high': tile,
            'low': tile,
            'staging': [tile, tile],
            'extra': list(extra),
        },
    )(keys, scalars, factors)
    return results


def multiply_split(high: Ref, low: Ref, a: jax.Array, b: jax.Array) -> jax.Array:
    """Computes a · b of float32 [C, C] in registers; the two bfloat16 numbers of b are placed in shared memory."""
    release()
    high[...], low[...] = in_parts(b, 2)
    plgpu.commit_smem()
    a_high, a_low = in_parts(a, 2)
    return sum_products([(a_high, high), (a_high, low), (a_low, high)])[0]


def _make_system(keys: list[Ref], scalars: list[Ref]) -> jax.Array:
    """Makes A, float32 in registers."""
    beta_C, t_C = scalars
    t_rows = repeat_per_row(load_rows(t_C), TILE)
    (products,) = sum_products([(k, k.transpose((1, 0))) for k in keys])
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
