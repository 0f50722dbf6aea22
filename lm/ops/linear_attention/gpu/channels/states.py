"""The walk from chunk to chunk, and back, on Hopper GPUs: one kernel for states and for their gradients.

    S_{t+1} = diag(w_t) S_t + b_tᵀ c_t

Forwards, b are keys times the factors until the chunk's end, and c are values. Backwards, b are queries times the
factors since the chunk's start, and c are the gradients of outputs. Each part of a head has one thread block, with S in
registers. Letters are explained in `plan`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.gpu import (
    TILE,
    load_matrix,
    load_rows,
    matrix,
    product,
    repeat_per_row,
    slice_tile,
    wait_for_copies,
    walk,
    write,
)


class WalkedTokens(NamedTuple):
    """The arrays of the formula: b and c bfloat16, as `slice_b` and `slice_c` take them, and w float32 [N, T C]."""

    b: Any
    c: Any
    w: Any


class WalkedChunks(NamedTuple):
    """S before each chunk, bfloat16 [N, T C, 64], and S after all chunks, float32 [N, 64, 64]."""

    before: Any
    after: Any


def walk_states(
    tokens: WalkedTokens, start: jax.Array, slice_b: Callable, slice_c: Callable, *, backwards: bool = False
) -> WalkedChunks:
    """Walks from the first S, float32 [N, 64, 64], through all chunks.

    With `backwards` it walks from the last chunk to the first, and "before" means after. `slice_b` and `slice_c` are
    methods of a plan.
    """
    count, length = tokens.w.shape

    def channel_states(tokens, start, results, placed):
        number = lax.axis_index('part')

        def step(chunk, tiles: WalkedTokens, state):
            wait_for_copies()
            placed[...] = state.astype(placed.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(placed, results.before.at[number, slice_tile(chunk)])
            return state * repeat_per_row(load_rows(tiles.w), TILE) + product(tiles.b.transpose((1, 0)), tiles.c)

        sources = WalkedTokens(slice_b(tokens.b, number), slice_c(tokens.c, number), tokens.w.at[number])
        state = walk(sources, 0, 0, length // TILE, step, load_matrix(start.at[number]), backwards)
        write(state, results.after.at[number], matrix(TILE, TILE, dtype=jnp.float32))

    states = jax.ShapeDtypeStruct((count, length, TILE), jnp.bfloat16)
    (results,) = plgpu.kernel(
        channel_states,
        out_type=(WalkedChunks(states, jax.ShapeDtypeStruct(start.shape, jnp.float32)),),
        grid=(count,),
        grid_names=('part',),
        scratch_types=[matrix(TILE, TILE)],
    )(tokens, start)
    return results
