"""How a tile of tokens meets the sums over the tokens of other blocks, in the GPU kernels of linear attention.

R features x of the tokens, D head size, S products in a square of x ⊗ x. The sums Z = Σ (y ⊗ y) vᵀ come square by
square from memory while the squares before are used.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.linear_attention.pallas_gpu_features import (
    GROUP,
    SLICE,
    SQUARE,
    TILE,
    by_row,
    load_matrix,
    load_rows,
    matrix,
    multiply,
    product,
    products,
    squares,
    zeros,
)

SLOTS = 2


def scratch(features: int) -> list:
    """Shared memory and barriers of a `Meeting`."""
    return [
        matrix(TILE, features),
        plgpu.SMEM((features, TILE), jnp.bfloat16),
        matrix(3 * features, features),
        matrix(SLOTS, SQUARE, TILE),
        plgpu.Barrier(num_arrivals=3),
        plgpu.Barrier(num_barriers=SLOTS),
    ]


class Meeting:
    """One tile of tokens and the sums of its block, from the first copy on."""

    def __init__(self, x, xt, moment, state, place, scratch, register):
        """Starts the copies.

        Args:
            x: [N, L, R] in memory.
            xt: its transpose [N, R, L].
            moment: [N, L / block, 3R, R]: Σ y yᵀ in three parts.
            state: [N, L / block, squares, S, D]: those of `squares`, for `gradient` then also their mirror images.
            place: the head, the tokens of the tile, the block.
            scratch: `scratch(R)`.
            register: `spare(plan)`.
        """
        head, tokens, block = place
        self.x, self.xt, self.moment, self.slots, self.ready, self.arrived = scratch
        self.state, self.register = state.at[head, block], register
        self.features = self.x.shape[1]
        plgpu.copy_gmem_to_smem(x.at[head, tokens], self.x, self.ready)
        plgpu.copy_gmem_to_smem(xt.at[head, :, tokens], self.xt, self.ready)
        plgpu.copy_gmem_to_smem(moment.at[head, block], self.moment, self.ready)
        for index in range(SLOTS):
            self._fetch(index)

    def _fetch(self, index: int) -> None:
        slot = index % SLOTS
        plgpu.copy_gmem_to_smem(self.state.at[index], self.slots.at[slot], self.arrived.at[slot])

    def wait(self) -> None:
        """For all but the squares."""
        plgpu.barrier_wait(self.ready)

    def times_moment(self) -> jax.Array:
        """moment · x, float32 [TILE, R]."""
        size = self.features

        def compute(sum_TxR):
            for i in range(3):
                plgpu.wgmma(sum_TxR, self.x, self.moment.at[i * size : (i + 1) * size])
            return sum_TxR[...]

        return pl.run_scoped(compute, plgpu.ACC((TILE, size), jnp.float32))

    def squares(self, sum_TxD=None, g=None) -> list[jax.Array]:
        """Adds ⟨x ⊗ x, Z⟩ to an accumulator, or differentiates such sums, or both.

        Args:
            sum_TxD: accumulator of Σ_ij x_i x_j Z_ij, or None.
            g: [TILE, D] in shared memory, or None.

        Returns:
            With g, Σ_i x_i ⟨Z_ij, g⟩ for the features j of each group, half of the gradient: float32 [TILE, 16] each.
        """
        upper = squares(self.features)
        order = upper if g is None else upper + [(h, g_) for g_, h in upper if g_ != h]
        gradients = [zeros(TILE, GROUP) for _ in range(self.features // GROUP)] if g is not None else []
        x_TxR = load_matrix(self.x)
        for index, (row, column) in enumerate(order):
            slot = self.slots.at[index % SLOTS]
            plgpu.barrier_wait(self.arrived.at[index % SLOTS])
            rows = self.xt.at[row * GROUP : (row + 1) * GROUP]
            if sum_TxD is not None and row <= column:
                x_TxG = x_TxR[:, column * GROUP : (column + 1) * GROUP]
                x_TxG = x_TxG if row == column else x_TxG + x_TxG
                for i in range(SQUARE // SLICE):
                    multiply(sum_TxD, products(x_TxG, rows, i), slot.at[i * SLICE : (i + 1) * SLICE], self.register)
            if g is not None:
                dphi_TxS = product(g, slot.transpose((1, 0)))
                for i in range(GROUP):
                    part_TxG = dphi_TxS[:, i * GROUP : (i + 1) * GROUP]
                    gradients[column] += by_row(load_rows(rows.at[i]).astype(jnp.float32), GROUP) * part_TxG
            if index + SLOTS < len(order):
                plgpu.wgmma_wait(0)
                plgpu.commit_smem()
                self._fetch(index + SLOTS)
        return gradients
