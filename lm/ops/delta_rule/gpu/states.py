"""The walk from chunk to chunk of the delta rule, and back, on Hopper GPUs: one Mosaic GPU kernel for both.

    n_t = c_t + a_t S_t          S_{t+1} = w_t S_t + b_tᵀ n_t + d_t

w_t is a number, or a diagonal matrix with a number per row of S. N key heads of all sequences, T chunks of CHUNK
tokens, E key size, D value size. Keys and values are in *parts* of TILE numbers. Each part of a value has a thread
block of its own, which holds the rows of S part by part of the key.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.delta_rule.gpu.sides import WalkSides
from lm.ops.gpu import (
    TILE,
    load_matrix,
    load_rows,
    matrix,
    product,
    repeat_per_row,
    slice_tile,
    sum_products,
    wait_for_copies,
    walk,
    write,
)

CHUNK = TILE


def walk_states(
    sides: WalkSides, start_NxExD: jax.Array, *, backwards: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Walks from the first S, float32, through all chunks; S is in registers.

    With `backwards` it walks from the last chunk to the first, and "before" means after.

    Returns:
        (S before each chunk, the n, S after all chunks), the first two in bfloat16, the last in float32.
    """
    n, chunks, _, value_size = sides.c_NxTxCxD.shape
    key_size, by_row = sides.a_NxTxCxE.shape[3], sides.w.ndim == 3
    parts = range(key_size // TILE)

    def delta_rule_states(sides, start, before, new, after, before_smem, new_smem):
        head, columns = lax.axis_index('head'), slice_tile(lax.axis_index('part'))

        def step(number, tiles: WalkSides, states: tuple[jax.Array, ...]):
            wait_for_copies()
            for state, smem in zip(states, before_smem, strict=True):
                smem[...] = state.astype(smem.dtype)
            plgpu.commit_smem()
            for part, smem in zip(parts, before_smem, strict=True):
                rows = slice_tile(number * len(parts) + part)
                plgpu.copy_smem_to_gmem(smem, before.at[head, rows, columns])
            (seen_CxD,) = sum_products(list(zip(tiles.a_NxTxCxE, before_smem, strict=True)))
            new_smem[...] = (load_matrix(tiles.c_NxTxCxD).astype(jnp.float32) + seen_CxD).astype(new_smem.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(new_smem, new.at[head, slice_tile(number), columns])

            def advance(part: int) -> jax.Array:
                factors = repeat_per_row(load_rows(tiles.w[part]), TILE) if by_row else tiles.w[0]
                state = states[part] * factors + product(tiles.b_NxTxCxE[part].transpose((1, 0)), new_smem)
                if tiles.d_NxTxExD is None:
                    return state
                return state + load_matrix(tiles.d_NxTxExD[part]).astype(jnp.float32)

            return tuple(advance(part) for part in parts)

        sources = _slice_sources(sides, parts, head, columns)
        first = tuple(load_matrix(start.at[head, slice_tile(part), columns]) for part in parts)
        last = walk(sources, 0, 0, chunks, step, first, backwards)
        for part, state in zip(parts, last, strict=True):
            to = after.at[head, slice_tile(part), columns]
            write(state, to, matrix(TILE, TILE, dtype=jnp.float32))

    tile = matrix(TILE, TILE)
    states, news = (jax.ShapeDtypeStruct((n, chunks * rows, value_size), jnp.bfloat16) for rows in (key_size, TILE))
    before, new, after = plgpu.kernel(
        delta_rule_states,
        out_type=(states, news, jax.ShapeDtypeStruct(start_NxExD.shape, jnp.float32)),
        grid=(n, value_size // TILE),
        grid_names=('head', 'part'),
        scratch_types=[[tile] * len(parts), tile],
    )(_flatten_chunks(sides), start_NxExD)
    return before.reshape(n, chunks, key_size, value_size), new.reshape(sides.c_NxTxCxD.shape), after


def _flatten_chunks(sides: WalkSides) -> WalkSides:
    """Joins the rows of all chunks: the walk takes TILE rows per chunk of every array.

    w with a number per row of S is [N, parts of keys, T · TILE], and d is [N, parts of keys, T · TILE, D].
    """
    n, chunks, _, key_size = sides.a_NxTxCxE.shape

    def flatten(x_NxTxCxF):
        return x_NxTxCxF.reshape(n, chunks * TILE, -1)

    def gather_parts(x_NxTxEx):
        last = x_NxTxEx.shape[3:]
        x = x_NxTxEx.reshape(n, chunks, key_size // TILE, TILE, *last).swapaxes(1, 2)
        return x.reshape(n, key_size // TILE, chunks * TILE, *last)

    return WalkSides(
        flatten(sides.a_NxTxCxE),
        flatten(sides.b_NxTxCxE),
        flatten(sides.c_NxTxCxD),
        gather_parts(sides.w) if sides.w.ndim == 3 else jnp.repeat(sides.w, TILE, axis=1),
        None if sides.d_NxTxExD is None else gather_parts(sides.d_NxTxExD),
    )


def _slice_sources(sides: WalkSides, parts: range, head: jax.Array, columns: pl.Slice) -> WalkSides:
    """Returns what one thread block walks over, inside of the kernel; arrays with keys are lists of their parts."""
    d = sides.d_NxTxExD
    return WalkSides(
        [sides.a_NxTxCxE.at[head, :, slice_tile(part)] for part in parts],
        [sides.b_NxTxCxE.at[head, :, slice_tile(part)] for part in parts],
        sides.c_NxTxCxD.at[head, :, columns],
        [sides.w.at[head, part] for part in parts] if len(sides.w.shape) == 3 else sides.w.at[head],
        None if d is None else [d.at[head, part, :, columns] for part in parts],
    )
