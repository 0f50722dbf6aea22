"""The walk from chunk to chunk of the delta rule, and back, on Hopper GPUs: one Mosaic GPU kernel for both.

    n_t = c_t + a_t S_t          S_{t+1} = w_t S_t + b_tᵀ n_t + d_t

N key heads of all sequences, T chunks of CHUNK tokens, E key size, D value size, both CHUNK.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.gpu import TILE, load_matrix, matrix, product, sent, walk, write

CHUNK = TILE


def states(a, b, c, w, start, d=None, *, backwards: bool = False) -> tuple[jax.Array, jax.Array, jax.Array]:
    """S before each chunk, bfloat16 [N, T, E, D], the n, bfloat16 [N, T, C, D], and S after all, float32 [N, E, D].

    One thread block a head, with S in registers.

    Args:
        a: [N, T, C, E] bfloat16.
        b: [N, T, C, E] bfloat16.
        c: [N, T, C, D] bfloat16.
        w: [N, T] float32.
        start: the first S, float32 [N, E, D].
        d: [N, T, E, D] bfloat16; None: 0.
        backwards: from the last chunk to the first; "before" is then after.
    """
    n, chunks, _, size = c.shape

    def delta_rule_states(*refs):
        (a, b, c, w, *d), (start, before, news, after, before_smem, new_smem) = refs[:-6], refs[-6:]
        head = lax.axis_index('head')

        def step(number, tiles, state_ExD):
            a_CxE, b_CxE, c_CxD, w_C, *d_ExD = tiles
            rows = pl.ds(number * TILE, TILE)
            sent()
            before_smem[...] = state_ExD.astype(before_smem.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(before_smem, before.at[head, rows])
            new_CxD = load_matrix(c_CxD).astype(jnp.float32) + product(a_CxE, before_smem)
            new_smem[...] = new_CxD.astype(new_smem.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(new_smem, news.at[head, rows])
            state_ExD = state_ExD * w_C[0] + product(b_CxE.transpose((1, 0)), new_smem)
            return state_ExD + load_matrix(d_ExD[0]).astype(jnp.float32) if d_ExD else state_ExD

        sources = [x.at[head] for x in (a, b, c, w, *d)]
        state_ExD = walk(sources, 0, 0, chunks, step, load_matrix(start.at[head]), backwards)
        write(state_ExD, after.at[head], matrix(TILE, size, dtype=jnp.float32))

    rows = jax.ShapeDtypeStruct((n, chunks * TILE, size), jnp.bfloat16)
    before, news, after = plgpu.kernel(
        delta_rule_states,
        out_type=[rows, rows, jax.ShapeDtypeStruct(start.shape, jnp.float32)],
        grid=(n,),
        grid_names=('head',),
        scratch_types=[matrix(TILE, size), matrix(TILE, size)],
    )(*(x.reshape(n, chunks * TILE, -1) for x in (a, b, c)), jnp.repeat(w, TILE, axis=1), *_rows(d), start)
    return before.reshape(c.shape), news.reshape(c.shape), after


def _rows(d_NxTxExD: jax.Array | None) -> list[jax.Array]:
    return [] if d_NxTxExD is None else [d_NxTxExD.reshape(d_NxTxExD.shape[0], -1, d_NxTxExD.shape[-1])]
