"""The triangular systems of chunks whose key channels have factors of their own, on Hopper GPUs.

    X = (I + A)⁻¹     A_ij = β_i w_ij, j < i     w: `lm.ops.gpu.channel_pairs`, of keys with keys

The inverse is made as in `lm.ops.delta_rule.gpu.systems`. G are sums of the logs since the chunk's start. N key heads
of all sequences, L tokens in chunks of C, E key size, D value size. C is TILE, and keys and values are in parts of TILE
numbers.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.delta_rule.gpu.systems import Ref, invert, multiply_split, send_products, turn
from lm.ops.dots import in_parts
from lm.ops.gpu import (
    FAST,
    TILE,
    load_columns,
    load_rows,
    matrix,
    release,
    repeat_per_column,
    repeat_per_row,
    send,
    slice_tile,
    wait_for_copies,
    zeros,
)
from lm.ops.gpu.channel_pairs import (
    PairGradientMemory,
    PairMemory,
    Selections,
    differentiate_pairs,
    fade,
    make_factors,
    weigh_earlier,
)
from lm.ops.linear_attention.gpu.channels.plan import KernelTokens


def solve(
    system: KernelTokens[jax.Array], beta_NxL: jax.Array, v_NxLxD: jax.Array, interpreted: bool
) -> list[jax.Array]:
    """Computes X diag(β) V and -X diag(β) (K exp(G)), bfloat16 [N, L, D] and [N, L, E].

    A is made of the keys and the logs of `system`, and of β, float32.
    """

    def pair(x: jax.Array, *, keys, factors, beta, pairs: PairMemory, **_):
        for k, logs in keys:
            since = make_factors(Selections().since(), logs, pairs.register)
            release()
            k[...] = fade(k, since)
        plgpu.commit_smem()
        scale = load_columns(beta)
        values, of_keys = (in_parts(x * repeat_per_column(factor, TILE), 2) for factor in (scale, -scale))
        return [(values, factors[0]), (of_keys, [k for k, _ in keys])]

    return _call('solutions', pair, system, beta_NxL, [v_NxLxD], interpreted)


def solve_transposed(
    system: KernelTokens[jax.Array],
    beta_NxL: jax.Array,
    dnew_NxLxD: jax.Array,
    dseen_NxLxE: jax.Array,
    interpreted: bool,
) -> list[jax.Array]:
    """Computes Xᵀ times the gradients of both solutions, in their shapes."""

    def pair(x: jax.Array, *, factors, high, low, **_):
        inverse = turn(x, high, low)
        return [(inverse, d) for d in factors]

    return _call('gradients', pair, system, beta_NxL, [dnew_NxLxD, dseen_NxLxE], interpreted)


def _call(
    name: str,
    pair: Callable,
    system: KernelTokens[jax.Array],
    beta: jax.Array,
    factors: list[jax.Array],
    interpreted: bool,
) -> list[jax.Array]:
    """Runs the kernel: `pair` takes the inverse and what is in shared memory, and returns what `send_products` takes.

    There are the parts of `keys` with their logs and of each of the other `factors`, which arrive at `ready`; and
    `beta`, float32, which arrives at `beta_ready`. `pairs` is memory of the products, and `high` and `low` are for the
    two bfloat16 parts of an operand.
    """
    n, length, key_size = system.k.shape

    def body(k, logs, beta, factors, out, /, *, ready, beta_ready, staging, **chunk):
        head, rows = lax.axis_index('head'), slice_tile(lax.axis_index('chunk'))
        for source, parts in (((k, logs), chunk['keys']), *zip(factors, chunk['factors'], strict=True)):
            for part, place in enumerate(parts):
                for x, to in zip(jax.tree.leaves(source), jax.tree.leaves(place), strict=True):
                    plgpu.copy_gmem_to_smem(x.at[head, rows, slice_tile(part)], to, ready)
        plgpu.copy_gmem_to_smem(beta.at[head, rows], chunk['beta'], beta_ready)
        plgpu.barrier_wait(ready)
        plgpu.barrier_wait(beta_ready)
        register = chunk['pairs'].register
        a = _make_system(chunk['keys'], chunk['beta'], chunk['pairs'])
        x = invert(a, functools.partial(multiply_split, chunk['high'], chunk['low'], register))
        send_products(pair(x, **chunk), staging, [to.at[head, rows] for to in out], register)
        plgpu.wait_smem_to_gmem(0)

    body.__name__ = f'channel_delta_{name}'
    tile = matrix(TILE, TILE)
    keys = [(tile, [tile, tile])] * (key_size // TILE)
    parts = [[tile] * (factor.shape[2] // TILE) for factor in factors]
    (results,) = plgpu.kernel(
        body,
        out_type=([jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in (factors[0], system.k)],),
        grid=(length // TILE, n),
        grid_names=('chunk', 'head'),
        compiler_params=FAST,
        scratch_types={
            'keys': keys,
            'factors': parts,
            'ready': plgpu.Barrier(num_arrivals=len(jax.tree.leaves((keys, parts)))),
            'beta': plgpu.SMEM((TILE,), jnp.float32),
            'beta_ready': plgpu.Barrier(num_arrivals=1),
            'pairs': PairMemory(tile, [tile] if interpreted else []),
            'high': tile,
            'low': tile,
            'staging': [tile, tile],
        },
    )(system.k, system.logs, beta, factors)
    return results


def _make_system(keys: list[tuple[Ref, list[Ref]]], beta: Ref, memory: PairMemory) -> jax.Array:
    """Makes A, float32 in registers."""
    parts = [weigh_earlier(k, k, logs, memory, zeros(TILE, TILE)) for k, logs in keys]
    return sum(parts[1:], parts[0]) * repeat_per_row(load_rows(beta), TILE)


def differentiate_systems(
    system: KernelTokens[jax.Array], scaled: jax.Array, dsystem: jax.Array, interpreted: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the gradients of keys and logs through A, whose rows are pairs of keys times β with keys.

    Args:
        system: keys and logs.
        scaled: keys times β, bfloat16 [N, L, E].
        dsystem: the gradients of each chunk's A, bfloat16 [N, L, C].
        interpreted: whether the kernel is interpreted.

    Returns:
        The gradients that A gives to keys times β, and to keys, bfloat16, and to the logs, float32; [N, L, E].
    """
    n, length, key_size = system.k.shape

    def channel_delta_system_gradients(sources, dsystem, out, *, vectors, dpairs, ready, scratch, staging):
        head, rows, columns = lax.axis_index('head'), *(slice_tile(lax.axis_index(each)) for each in ('chunk', 'part'))
        for source, to in zip(jax.tree.leaves(sources), jax.tree.leaves(vectors), strict=True):
            plgpu.copy_gmem_to_smem(source.at[head, rows, columns], to, ready)
        plgpu.copy_gmem_to_smem(dsystem.at[head, rows], dpairs, ready)
        plgpu.barrier_wait(ready)
        nothing = zeros(TILE, TILE)
        scratch.dlog[...] = nothing
        x, k, logs = vectors
        found = differentiate_pairs(x, k, logs, dpairs, scratch, (nothing, nothing))
        plgpu.commit_smem()
        *places, dlog = (to.at[head, rows, columns] for to in out)
        plgpu.copy_smem_to_gmem(scratch.dlog, dlog)
        for value, to in zip(found, places, strict=True):
            wait_for_copies()
            release()
            send(value, staging, to)
        plgpu.wait_smem_to_gmem(0)

    tile, shape = matrix(TILE, TILE), system.k.shape
    (gradients,) = plgpu.kernel(
        channel_delta_system_gradients,
        out_type=(tuple(jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.bfloat16, jnp.bfloat16, jnp.float32)),),
        grid=(length // TILE, n, key_size // TILE),
        grid_names=('chunk', 'head', 'part'),
        compiler_params=FAST,
        scratch_types={
            'vectors': (tile, tile, [tile, tile]),
            'dpairs': tile,
            'ready': plgpu.Barrier(num_arrivals=5),
            'scratch': PairGradientMemory.allocate(interpreted),
            'staging': tile,
        },
    )((scaled, system.k, system.logs), dsystem)
    return gradients
