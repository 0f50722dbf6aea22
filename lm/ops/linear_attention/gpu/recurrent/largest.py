"""The largest product of each query with the rows of a feature map, on Hopper GPUs."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.gpu import TILE, matrix, product, slice_head, walk, write, zeros


def find_largest(x_BxLxKE: jax.Array, w_MxE: jax.Array) -> jax.Array:
    """Computes max_m ⟨w_m, x⟩, float32 [B K, L], one thread block per tile of tokens of a head."""
    batch, length, _ = x_BxLxKE.shape
    heads = x_BxLxKE.shape[2] // TILE
    n = batch * heads

    def linear_attention_recurrent_largest(x, w, result, x_smem, ready):
        head, tokens = lax.axis_index('head'), pl.ds(lax.axis_index('tile') * TILE, TILE)
        plgpu.copy_gmem_to_smem(slice_head(x, head, heads).at[tokens], x_smem, ready)
        plgpu.barrier_wait(ready)

        def rows(number, tiles, most_T):
            return jnp.maximum(most_T, jnp.max(product(x_smem, tiles[0].transpose((1, 0))), axis=1))

        most_T = walk((w,), 0, 0, w.shape[0] // TILE, rows, zeros(TILE) - jnp.inf)
        write(most_T, result.at[head, tokens], plgpu.SMEM((TILE,), jnp.float32))

    return plgpu.kernel(
        linear_attention_recurrent_largest,
        out_type=jax.ShapeDtypeStruct((n, length), jnp.float32),
        grid=(length // TILE, n),
        grid_names=('tile', 'head'),
        scratch_types=[matrix(TILE, TILE), plgpu.Barrier()],
    )(x_BxLxKE, w_MxE)
