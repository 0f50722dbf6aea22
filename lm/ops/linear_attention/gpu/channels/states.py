"""The walk from chunk to chunk, and back, on Hopper GPUs: one kernel for states and for their gradients.

    S_{t+1} = diag(w_t) S_t + b_tᵀ c_t

Forwards, b are keys times the factors until the chunk's end, and c are values. Backwards, b are queries times the
factors since the chunk's start, and c are the gradients of outputs. Each part of a head has one thread block, with S in
registers. Letters are explained in `plan`.
"""

from collections.abc import Callable

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
from lm.ops.linear_attention.gpu.channels.plan import Ref

Slice = Callable[[Ref, jax.Array], Ref]


def walk_states(
    start: jax.Array,
    *,
    b: jax.Array,
    c: jax.Array,
    w: jax.Array,
    slice_b: Slice,
    slice_c: Slice,
    backwards: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Walks through all chunks.

    Args:
        start: the first S, float32 [N, 64, 64].
        b, c: bfloat16.
        w: float32 [N, T C].
        slice_b: the method of a plan that finds the part of a thread block in b.
        slice_c: the same for c.
        backwards: walk from the last chunk to the first.

    Returns:
        (S before each chunk, S after all chunks): bfloat16 [N, T C, 64] and float32 [N, 64, 64]. With `backwards`,
        "before" means after.
    """
    count, length = w.shape

    def channel_states(b, c, w, start, before, after, placed):
        number = lax.axis_index('part')

        def step(chunk, tiles, state):
            b_smem, c_smem, w_smem = tiles
            wait_for_copies()
            placed[...] = state.astype(placed.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(placed, before.at[number, slice_tile(chunk)])
            return state * repeat_per_row(load_rows(w_smem), TILE) + product(b_smem.transpose((1, 0)), c_smem)

        sources = slice_b(b, number), slice_c(c, number), w.at[number]
        state = walk(sources, 0, 0, length // TILE, step, load_matrix(start.at[number]), backwards)
        write(state, after.at[number], matrix(TILE, TILE, dtype=jnp.float32))

    states = jax.ShapeDtypeStruct((count, length, TILE), jnp.bfloat16)
    before, after = plgpu.kernel(
        channel_states,
        out_type=(states, jax.ShapeDtypeStruct(start.shape, jnp.float32)),
        grid=(count,),
        grid_names=('part',),
        scratch_types=[matrix(TILE, TILE)],
    )(b, c, w, start)
    return before, after
