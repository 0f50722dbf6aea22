"""The walk from chunk to chunk of the delta rule, and back, on Hopper GPUs: one Mosaic GPU kernel for both.

    n_t = c_t + a_t S_t          S_{t+1} = w_t S_t + b_tᵀ n_t + d_t

w_t is a number, or a diagonal matrix with a number per row of S. N key heads of all sequences, T chunks of CHUNK
tokens, E key size, D value size, both CHUNK.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.gpu import TILE, load_matrix, load_rows, matrix, product, repeat_per_row, wait_for_copies, walk, write

CHUNK = TILE


class WalkSides(NamedTuple):
    """The arrays of the formula; bfloat16, but w float32, [N, T] or [N, T, E]. d: None for 0."""

    a_NxTxCxE: jax.Array
    b_NxTxCxE: jax.Array
    c_NxTxCxD: jax.Array
    w: jax.Array
    d_NxTxExD: jax.Array | None = None


class WalkedStates(NamedTuple):
    """S before each chunk and the n, bfloat16, and S after all chunks, float32; references inside of the kernel."""

    before_NxTxExD: Any
    new_NxTxCxD: Any
    after_NxExD: Any


def walk_states(sides: WalkSides, start_NxExD: jax.Array, *, backwards: bool = False) -> WalkedStates:
    """Walks from the first S, float32, through all chunks.

    With `backwards` it walks from the last chunk to the first, and "before" means after.

    Each head has one thread block, with S in registers.
    """
    n, chunks, _, size = sides.c_NxTxCxD.shape
    by_row = sides.w.ndim == 3

    def delta_rule_states(sides, start, results, before_smem, new_smem):
        head = lax.axis_index('head')

        def step(number, tiles: WalkSides, state_ExD):
            rows = pl.ds(number * TILE, TILE)
            wait_for_copies()
            before_smem[...] = state_ExD.astype(before_smem.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(before_smem, results.before_NxTxExD.at[head, rows])
            new_CxD = load_matrix(tiles.c_NxTxCxD).astype(jnp.float32) + product(tiles.a_NxTxCxE, before_smem)
            new_smem[...] = new_CxD.astype(new_smem.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(new_smem, results.new_NxTxCxD.at[head, rows])
            factors = repeat_per_row(load_rows(tiles.w), size) if by_row else tiles.w[0]
            state_ExD = state_ExD * factors + product(tiles.b_NxTxCxE.transpose((1, 0)), new_smem)
            if tiles.d_NxTxExD is None:
                return state_ExD
            return state_ExD + load_matrix(tiles.d_NxTxExD).astype(jnp.float32)

        sources = jax.tree.map(lambda x: x.at[head], sides)
        state_ExD = walk(sources, 0, 0, chunks, step, load_matrix(start.at[head]), backwards)
        write(state_ExD, results.after_NxExD.at[head], matrix(TILE, size, dtype=jnp.float32))

    rows = jax.ShapeDtypeStruct((n, chunks * TILE, size), jnp.bfloat16)
    matrices = jax.tree.map(lambda x: x.reshape(n, chunks * TILE, -1), sides._replace(w=None))
    w = sides.w.reshape(n, -1) if by_row else jnp.repeat(sides.w, TILE, axis=1)
    (results,) = plgpu.kernel(
        delta_rule_states,
        out_type=(WalkedStates(rows, rows, jax.ShapeDtypeStruct(start_NxExD.shape, jnp.float32)),),
        grid=(n,),
        grid_names=('head',),
        scratch_types=[matrix(TILE, size), matrix(TILE, size)],
    )(matrices._replace(w=w), start_NxExD)
    shape = sides.c_NxTxCxD.shape
    return WalkedStates(results.before_NxTxExD.reshape(shape), results.new_NxTxCxD.reshape(shape), results.after_NxExD)
