"""Features of queries or keys, tile by tile in the recurrent GPU kernels.

T tokens of a tile, C chunks of 64 features, E size of the vectors that a feature map takes.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.gpu import TILE, by_row, load_matrix, load_rows, matrix, release, together
from lm.ops.linear_attention.gpu.recurrent.plan import CHUNK, RecurrentPlan

FAST = plgpu.CompilerParams(approx_math=True)
"""Exponentials are an instruction."""


class Features:
    """Of one side of a thread block.

    Given features are one array [N, M / 64, L, 64]. Those that the kernel makes are of two, vectors [N, L, E] and
    shifts float32 [N, L], and of two that queries and keys share: the rows w [M / 64, 64, E] in bfloat16, and what that
    leaves of them.
    """

    def __init__(self, plan: RecurrentPlan, sources: list, made: list, rows: list):
        """
        Args:
            plan: the call.
            sources: in memory, [L, …] of one head: the chunks, or vectors and shifts.
            made: shared memory for features that are `placed`.
            rows: of the slice, high and low parts in shared memory.
        """
        self.plan, self.sources, self.made, self.rows = plan, sources, made, rows

    @staticmethod
    def sides(plan: RecurrentPlan, sides: list[list], rows: list, scratch: list) -> list['Features']:
        """Of the arrays of each side, once the rows are there."""
        part, head = lax.axis_index('slice'), lax.axis_index('head')
        chunks, first = range(plan.chunks), part * plan.chunks
        if plan.feature_map is None:
            return [Features(plan, [x.at[head, first + c] for c in chunks], [], []) for (x,) in sides]
        made, placed, ready = scratch
        for array, parts in zip(rows, placed, strict=True):
            for c in chunks:
                plgpu.copy_gmem_to_smem(array.at[first + c], parts[c], ready)
        plgpu.barrier_wait(ready)
        return [
            Features(plan, [a.at[head] for a in arrays], to, placed) for arrays, to in zip(sides, made, strict=True)
        ]

    @staticmethod
    def arrays(plan: RecurrentPlan) -> tuple[int, int]:
        """How many arrays there are in memory of a side, and of rows."""
        return (1, 0) if plan.feature_map is None else (2, 2)

    @staticmethod
    def scratch(plan: RecurrentPlan, placed: tuple[bool, ...]) -> list:
        """`placed`: of each side, whether its features ever are."""
        if plan.feature_map is None:
            return []
        made, rows = (
            [[matrix(TILE, CHUNK) for _ in range(plan.chunks)] if wanted else [] for wanted in several]
            for several in (placed, (True, True))
        )
        return [made, rows, plgpu.Barrier(num_arrivals=2 * plan.chunks)]

    def tile(self, tiles: list, placed: bool = True) -> list:
        """The features of a tile of each source, [T, 64], C of them.

        In shared memory, or in registers where the kernel makes them and they are not to be `placed`.
        """
        if self.plan.feature_map is None:
            return tiles
        made = (self._of_shifted(self._shifted(tiles, c)).astype(jnp.bfloat16) for c in range(self.plan.chunks))
        if not placed:
            return list(made)
        release()
        for to, phi_TxF in zip(self.made, made, strict=True):
            to[...] = phi_TxF
        plgpu.commit_smem()
        return self.made

    def pulled(self, tiles: list, c: int, dphi_TxF: jax.Array) -> jax.Array:
        """The gradient of z = ⟨w_m, x⟩ - s(x), for that of the features of chunk c."""
        return jax.vjp(self._of_shifted, self._shifted(tiles, c))[1](dphi_TxF)[0]

    def _of_shifted(self, z_TxF):
        return self.plan.feature_map.of_shifted(z_TxF, self.plan.slices * self.plan.chunks * CHUNK)

    def _shifted(self, tiles, c):
        x_TxE, shift_T = tiles
        products = [(x_TxE, w[c].transpose((1, 0))) for w in self.rows]
        return together(products)[0] - by_row(load_rows(shift_T), CHUNK)


def widened(phi_TxF) -> jax.Array:
    """Features of a tile as float32, whether they are in registers or in shared memory."""
    return (phi_TxF if isinstance(phi_TxF, jax.Array) else load_matrix(phi_TxF)).astype(jnp.float32)
