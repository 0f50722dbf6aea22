"""The triangular systems of chunks whose key channels have factors of their own, on Hopper GPUs.

    X = (I + A)⁻¹     A_ij = β_i w_ij, j < i     w: `lm.ops.gpu.channel_pairs`, of keys with keys

The inverse is made as in `lm.ops.delta_rule.gpu.systems`. G are sums of the logs since the chunk's start. N key heads
of all sequences, L tokens in chunks of C, E key size, D value size. C is TILE, and keys and values are in parts of TILE
numbers.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.delta_rule.gpu.systems import Factors, invert, send_products, split
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
    zeros,
)
from lm.ops.gpu.channel_pairs import (
    LogParts,
    PairGradientMemory,
    PairMemory,
    Selections,
    differentiate_pairs,
    fade,
    make_factors,
    weigh_earlier,
)


class ChannelSystem(NamedTuple):
    """The arrays that make A: keys bfloat16 [N, L, E], logs [N, L, E] each, β float32 [N, L]."""

    k: Any
    logs: LogParts
    beta: Any


class KeyPart(NamedTuple):
    """A part of a chunk's keys, and of their logs, in shared memory."""

    k: Any
    logs: LogParts


class SystemMemory(NamedTuple):
    """Shared memory of a chunk.

    Attributes:
        keys: the parts of the keys and their logs.
        factors: the parts of each other array that the inverse is multiplied with.
        ready: the barrier of these.
        beta: β, float32.
        beta_ready: the barrier of β.
        pairs: memory of the products.
        high: where an operand's first bfloat16 part is placed.
        low: where its second part is placed.
        out: where a part of each of the two results is placed.
    """

    keys: list[KeyPart]
    factors: list[list]
    ready: Any
    beta: Any
    beta_ready: Any
    pairs: PairMemory
    high: Any
    low: Any
    out: list


def solve(system: ChannelSystem, v_NxLxD: jax.Array, interpreted: bool) -> list[jax.Array]:
    """Computes X diag(β) V and -X diag(β) (K exp(G)), bfloat16 [N, L, D] and [N, L, E]."""

    def pair(x: jax.Array, memory: SystemMemory) -> list[Factors]:
        for k, logs in memory.keys:
            since = make_factors(Selections().since(), logs, memory.pairs.register)
            release()
            k[...] = fade(k, since)
        plgpu.commit_smem()
        beta = load_columns(memory.beta)
        values, keys = (split(x * repeat_per_column(factor, TILE)) for factor in (beta, -beta))
        return [Factors(values, memory.factors[0]), Factors(keys, [k for k, _ in memory.keys])]

    return _call('solutions', pair, system, [v_NxLxD], interpreted)


def solve_transposed(
    system: ChannelSystem, dnew_NxLxD: jax.Array, dseen_NxLxE: jax.Array, interpreted: bool
) -> list[jax.Array]:
    """Computes Xᵀ times the gradients of both solutions, in their shapes."""

    def pair(x: jax.Array, memory: SystemMemory) -> list[Factors]:
        release()
        memory.high[...], memory.low[...] = split(x)
        plgpu.commit_smem()
        inverse = [part.transpose((1, 0)) for part in (memory.high, memory.low)]
        return [Factors(inverse, d) for d in memory.factors]

    return _call('gradients', pair, system, [dnew_NxLxD, dseen_NxLxE], interpreted)


def _call(
    name: str, pair: Callable, system: ChannelSystem, factors: list[jax.Array], interpreted: bool
) -> list[jax.Array]:
    """Runs the kernel: `pair` takes the inverse and the memory, and returns the `Factors` of each result."""
    n, length, key_size = system.k.shape

    def body(system, factors, out, memory: SystemMemory):
        head, rows = lax.axis_index('head'), slice_tile(lax.axis_index('chunk'))
        sources = (KeyPart(system.k, system.logs), memory.keys), *zip(factors, memory.factors, strict=True)
        for source, parts in sources:
            for part, place in enumerate(parts):
                for x, to in zip(jax.tree.leaves(source), jax.tree.leaves(place), strict=True):
                    plgpu.copy_gmem_to_smem(x.at[head, rows, slice_tile(part)], to, memory.ready)
        plgpu.copy_gmem_to_smem(system.beta.at[head, rows], memory.beta, memory.beta_ready)
        plgpu.barrier_wait(memory.ready)
        plgpu.barrier_wait(memory.beta_ready)

        def multiply(a, b):
            """Computes a · b of float32 [C, C] in registers."""
            release()
            memory.high[...], memory.low[...] = split(b)
            plgpu.commit_smem()
            a_high, a_low = split(a)
            pairs = [(a_high, memory.high), (a_high, memory.low), (a_low, memory.high)]
            return sum_products(pairs, scratch=memory.pairs.register)[0]

        x = invert(_make_system(memory), multiply)
        send_products(pair(x, memory), memory.out, [to.at[head, rows] for to in out], memory.pairs.register)
        plgpu.wait_smem_to_gmem(0)

    body.__name__ = f'channel_delta_{name}'
    tile, tokens = matrix(TILE, TILE), plgpu.SMEM((TILE,), jnp.float32)
    keys = [KeyPart(tile, LogParts(tile, tile))] * (key_size // TILE)
    parts = [[tile] * (factor.shape[2] // TILE) for factor in factors]
    memory = SystemMemory(
        keys,
        parts,
        plgpu.Barrier(num_arrivals=len(jax.tree.leaves((keys, parts)))),
        tokens,
        plgpu.Barrier(num_arrivals=1),
        PairMemory(tile, [tile] if interpreted else []),
        tile,
        tile,
        [tile, tile],
    )
    (results,) = plgpu.kernel(
        body,
        out_type=([jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in (factors[0], system.k)],),
        grid=(length // TILE, n),
        grid_names=('chunk', 'head'),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        scratch_types=[memory],
    )(system, factors)
    return results


def _make_system(memory: SystemMemory) -> jax.Array:
    """Makes A, float32 in registers."""
    parts = [weigh_earlier(k, k, logs, memory.pairs, zeros(TILE, TILE)) for k, logs in memory.keys]
    return sum(parts[1:], parts[0]) * repeat_per_row(load_rows(memory.beta), TILE)


class SystemGradientSources(NamedTuple):
    """The gradients of A, and what it was made of, bfloat16.

    Attributes:
        scaled: keys times β, [N, L, E].
        k: keys, [N, L, E].
        logs: logs of the factors, [N, L, E].
        dsystem: the gradients of each chunk's A, [N, L, C].
    """

    scaled: Any
    k: Any
    logs: LogParts
    dsystem: Any


class SystemGradients(NamedTuple):
    """The gradients that A gives to keys times β, and to keys, bfloat16, and to the logs, float32; [N, L, E]."""

    dscaled: Any
    dk: Any
    dlog: Any


class SystemGradientMemory(NamedTuple):
    """Shared memory of a chunk: the sources, the barrier of their copies, gradients, and results."""

    sources: SystemGradientSources
    ready: Any
    scratch: PairGradientMemory
    out: Any


def differentiate_systems(sources: SystemGradientSources, interpreted: bool) -> SystemGradients:
    """Computes the gradients of keys and logs through A, whose rows are pairs of keys times β with keys."""
    n, length, key_size = sources.k.shape

    def channel_delta_system_gradients(sources, out, memory: SystemGradientMemory):
        head, rows = lax.axis_index('head'), slice_tile(lax.axis_index('chunk'))
        columns, copied, scratch = slice_tile(lax.axis_index('part')), memory.sources, memory.scratch
        of_keys = (jax.tree.leaves(x._replace(dsystem=None)) for x in (sources, copied))
        for source, to in zip(*of_keys, strict=True):
            plgpu.copy_gmem_to_smem(source.at[head, rows, columns], to, memory.ready)
        plgpu.copy_gmem_to_smem(sources.dsystem.at[head, rows], copied.dsystem, memory.ready)
        plgpu.barrier_wait(memory.ready)
        nothing = zeros(TILE, TILE)
        scratch.dlog[...] = nothing
        found = differentiate_pairs(copied.scaled, copied.k, copied.logs, copied.dsystem, scratch, (nothing, nothing))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(scratch.dlog, out.dlog.at[head, rows, columns])
        for value, to in zip(found, (out.dscaled, out.dk), strict=True):
            wait_for_copies()
            release()
            send(value, memory.out, to.at[head, rows, columns])
        plgpu.wait_smem_to_gmem(0)

    tile, shape = matrix(TILE, TILE), sources.k.shape
    memory = SystemGradientMemory(
        SystemGradientSources(tile, tile, LogParts(tile, tile), tile),
        plgpu.Barrier(num_arrivals=5),
        PairGradientMemory.allocate(interpreted),
        tile,
    )
    of_keys = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    (gradients,) = plgpu.kernel(
        channel_delta_system_gradients,
        out_type=(SystemGradients(of_keys, of_keys, jax.ShapeDtypeStruct(shape, jnp.float32)),),
        grid=(length // TILE, n, key_size // TILE),
        grid_names=('chunk', 'head', 'part'),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        scratch_types=[memory],
    )(sources)
    return gradients
