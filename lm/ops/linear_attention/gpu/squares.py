"""How a tile of tokens meets the sums over the tokens of other blocks, in the GPU kernels of linear attention.

R features x of the tokens, D head size, S products in a square of x ⊗ x. The sums Z = Σ (y ⊗ y) vᵀ come square by
square from memory while the squares before are used.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.gpu import by_row, load_matrix, load_rows, matrix, multiply, product, release, zeros
from lm.ops.linear_attention.gpu.features import products
from lm.ops.linear_attention.gpu.plan import GROUP, SLICE, TILE

ROWS = GROUP // 2
"""Rows of a square that are held at a time: half of them."""

SLOTS = 3
"""Halves in shared memory: two to come, and one that may still be in use."""


def scratch(features: int) -> list:
    """Shared memory and barriers of a `Meeting`."""
    return [
        matrix(TILE, features),
        plgpu.SMEM((features, TILE), jnp.bfloat16),
        matrix(3 * features, features),
        matrix(SLOTS, ROWS * GROUP, TILE),
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
            state: [N, L / block, halves of squares, S / 2, D]: column by column, and for gradients all of them.
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
        for half in range(SLOTS - 1):
            self._fetch(jnp.int32(half))

    def _fetch(self, half) -> None:
        slot = lax.rem(half, SLOTS)
        plgpu.copy_gmem_to_smem(self.state.at[half], self.slots.at[slot], self.arrived.at[slot])

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
        groups, count = self.features // GROUP, self.state.shape[0]

        def use(halves_before, column, x_TxG, with_sum, i, gradient_TxG):
            half = halves_before + i
            slot = lax.rem(half, SLOTS)
            z_SxD, rows = self.slots.at[slot], self.xt.at[pl.ds(i * ROWS, ROWS)]
            plgpu.barrier_wait(self.arrived.at[slot])
            if with_sum:
                weight = jnp.where(i < 2 * column, 2.0, 1.0).astype(jnp.bfloat16)
                for j in range(ROWS * GROUP // SLICE):
                    phi_TxS = products(x_TxG * weight, rows, j)
                    multiply(sum_TxD, phi_TxS, z_SxD.at[j * SLICE : (j + 1) * SLICE], self.register)
            if g is not None:
                dphi_TxS = product(g, z_SxD.transpose((1, 0)))
                for j in range(ROWS):
                    part_TxG = dphi_TxS[:, j * GROUP : (j + 1) * GROUP]
                    gradient_TxG += by_row(load_rows(rows.at[j]).astype(jnp.float32), GROUP) * part_TxG

            # Were products in flight until the next round, the compiler would let none overlap with what follows it.
            plgpu.wgmma_wait(0)

            @pl.when(half + SLOTS - 1 < count)
            def _():
                release()
                self._fetch(half + SLOTS - 1)

            return gradient_TxG

        halves_before, gradients = 0, []
        for column in range(groups):
            x_TxG = load_matrix(self.x)[:, column * GROUP : (column + 1) * GROUP]
            gradient_TxG = zeros(TILE, GROUP)
            # Mirror images, below the diagonal, are in the sum already.
            summed = 0 if sum_TxD is None else 2 * (column + 1)
            last = summed if g is None else 2 * groups
            for with_sum, start, stop in ((True, 0, summed), (False, summed, last)):
                if start < stop:
                    body = functools.partial(use, halves_before, column, x_TxG, with_sum)
                    gradient_TxG = lax.fori_loop(start, stop, body, gradient_TxG)
            halves_before += last
            gradients.append(gradient_TxG)
        release()
        return gradients
