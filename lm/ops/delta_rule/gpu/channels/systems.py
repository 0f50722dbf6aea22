"""The triangular systems of chunks whose key channels have factors of their own, on Hopper GPUs.

    X = (I + A)⁻¹     A_ij = β_i w_ij, j < i     w: `lm.ops.gpu.channel_pairs`, of keys with keys

The inverse is made as in `lm.ops.delta_rule.gpu.systems`. G are sums of the logs since the chunk's start. N key heads
of all sequences, L tokens in chunks of C, E key size, D value size; C, E and D are TILE.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.delta_rule.gpu.systems import invert, split
from lm.ops.gpu import (
    TILE,
    load_columns,
    load_rows,
    matrix,
    release,
    repeat_per_column,
    repeat_per_row,
    send,
    sum_products,
    wait_for_copies,
    zeros,
)
from lm.ops.gpu.channel_pairs import (
    LogParts,
    PairGradientMemory,
    PairMemory,
    Selections,
    VectorGradients,
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


class SystemMemory(NamedTuple):
    """Shared memory of a chunk.

    Attributes:
        system: the arrays of A, but for β.
        factors: the two other factors of the inverse; one of them is None where the kernel makes it.
        ready: the barrier of these.
        beta: β, float32.
        beta_ready: the barrier of β.
        pairs: memory of the products.
        high: where an operand's first bfloat16 part is placed.
        low: where its second part is placed.
        out: where the two results are placed.
    """

    system: ChannelSystem
    factors: list
    ready: Any
    beta: Any
    beta_ready: Any
    pairs: PairMemory
    high: Any
    low: Any
    out: list


def solve(system: ChannelSystem, v_NxLxD: jax.Array, interpreted: bool) -> list[jax.Array]:
    """Computes X diag(β) V and -X diag(β) (K exp(G)), bfloat16 [N, L, D] and [N, L, E]."""

    def pair(x: jax.Array, memory: SystemMemory) -> list:
        since = make_factors(Selections().since(), memory.system.logs, memory.pairs.register)
        release()
        memory.pairs.keys[...] = fade(memory.system.k, since)
        plgpu.commit_smem()
        beta = repeat_per_column(load_columns(memory.beta), TILE)
        sides = ((x * beta, memory.factors[0]), (-x * beta, memory.pairs.keys))
        return [[(part, b) for part in split(a)] for a, b in sides]

    return _call('solutions', pair, system, [v_NxLxD], interpreted)


def solve_transposed(
    system: ChannelSystem, dnew_NxLxD: jax.Array, dseen_NxLxE: jax.Array, interpreted: bool
) -> list[jax.Array]:
    """Computes Xᵀ times the gradients of both solutions, in their shapes."""

    def pair(x: jax.Array, memory: SystemMemory) -> list:
        release()
        memory.high[...], memory.low[...] = split(x)
        plgpu.commit_smem()
        return [[(part.transpose((1, 0)), d) for part in (memory.high, memory.low)] for d in memory.factors]

    return _call('gradients', pair, system, [dnew_NxLxD, dseen_NxLxE], interpreted)


def _call(
    name: str, pair: Callable, system: ChannelSystem, factors: list[jax.Array], interpreted: bool
) -> list[jax.Array]:
    """Runs the kernel: `pair` takes the inverse and the memory, and returns pairs of operands for each result."""
    n, length, _ = system.k.shape

    def body(system, factors, out, memory: SystemMemory):
        head, rows = lax.axis_index('head'), pl.ds(lax.axis_index('chunk') * TILE, TILE)
        copied = [*jax.tree.leaves(memory.system), *memory.factors]
        for source, to in zip((system.k, *system.logs, *factors), copied, strict=True):
            plgpu.copy_gmem_to_smem(source.at[head, rows], to, memory.ready)
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
        results = sum_products(*pair(x, memory), scratch=memory.pairs.register)
        for value, place, to in zip(results, memory.out, out, strict=True):
            send(value, place, to.at[head, rows])
        plgpu.wait_smem_to_gmem(0)

    body.__name__ = f'channel_delta_{name}'
    tile, tokens = matrix(TILE, TILE), plgpu.SMEM((TILE,), jnp.float32)
    memory = SystemMemory(
        ChannelSystem(tile, LogParts(tile, tile), None),
        [tile] * len(factors),
        plgpu.Barrier(num_arrivals=3 + len(factors)),
        tokens,
        plgpu.Barrier(num_arrivals=1),
        PairMemory(tile, [tile] if interpreted else []),
        tile,
        tile,
        [tile, tile],
    )
    (results,) = plgpu.kernel(
        body,
        out_type=([jax.ShapeDtypeStruct(system.k.shape, jnp.bfloat16)] * 2,),
        grid=(length // TILE, n),
        grid_names=('chunk', 'head'),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        scratch_types=[memory],
    )(system, factors)
    return results


def _make_system(memory: SystemMemory) -> jax.Array:
    """Makes A, float32 in registers."""
    k, logs = memory.system.k, memory.system.logs
    weights = weigh_earlier(k, k, logs, memory.pairs, zeros(TILE, TILE))
    return weights * repeat_per_row(load_rows(memory.beta), TILE)


class SystemGradientSources(NamedTuple):
    """The arrays of the gradients of A, bfloat16 [N, L, 64].

    Attributes:
        scaled: keys times β.
        k: keys.
        logs: logs of the factors.
        dvalues, new: the gradients of A through U are the products of these, negative.
        dkeys, seen: the gradients of A through W are the products of these, negative.
    """

    scaled: Any
    k: Any
    logs: LogParts
    dvalues: Any
    new: Any
    dkeys: Any
    seen: Any


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
    n, length, _ = sources.k.shape

    def channel_delta_system_gradients(sources, out, memory: SystemGradientMemory):
        head, rows = lax.axis_index('head'), pl.ds(lax.axis_index('chunk') * TILE, TILE)
        copied, scratch = memory.sources, memory.scratch
        for source, to in zip(jax.tree.leaves(sources), jax.tree.leaves(copied), strict=True):
            plgpu.copy_gmem_to_smem(source.at[head, rows], to, memory.ready)
        plgpu.barrier_wait(memory.ready)
        dsystem = sum_products(
            [(copied.dvalues, copied.new.transpose((1, 0))), (copied.dkeys, copied.seen.transpose((1, 0)))]
        )[0]
        release()
        copied.new[...] = (-dsystem).astype(jnp.bfloat16)
        nothing = zeros(TILE, TILE)
        scratch.dlog[...] = nothing
        found = differentiate_pairs(
            copied.scaled, copied.k, copied.logs, copied.new, scratch, VectorGradients(nothing, nothing)
        )
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(scratch.dlog, out.dlog.at[head, rows])
        for value, to in zip(found, (out.dscaled, out.dk), strict=True):
            wait_for_copies()
            release()
            send(value, memory.out, to.at[head, rows])
        plgpu.wait_smem_to_gmem(0)

    tile, shape = matrix(TILE, TILE), sources.k.shape
    memory = SystemGradientMemory(
        SystemGradientSources(tile, tile, LogParts(tile, tile), tile, tile, tile, tile),
        plgpu.Barrier(num_arrivals=8),
        PairGradientMemory.allocate(interpreted),
        tile,
    )
    of_keys = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    (gradients,) = plgpu.kernel(
        channel_delta_system_gradients,
        out_type=(SystemGradients(of_keys, of_keys, jax.ShapeDtypeStruct(shape, jnp.float32)),),
        grid=(length // TILE, n),
        grid_names=('chunk', 'head'),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        scratch_types=[memory],
    )(sources)
    return gradients
