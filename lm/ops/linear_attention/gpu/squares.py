"""Reads of the sums over other blocks by a tile of tokens, in the GPU kernels of linear attention.

R features x of the tokens, D head size, S products in a square of x ⊗ x. The sums Z = Σ (y ⊗ y) vᵀ come square by
square from memory while the squares before are used.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.gpu import load_matrix, load_rows, matrix, multiply, product, release, repeat_per_row, sum_products, zeros
from lm.ops.linear_attention.gpu.features import multiply_features
from lm.ops.linear_attention.gpu.plan import GROUP, SLICE, TILE, FarTokens, Ref

ROWS = GROUP // 2
"""Rows of a square that are held at a time: half of the square."""

SLOTS = 3
"""Halves in shared memory: two to come, and one that may still be in use."""


def allocate_reader(features: int) -> dict[str, Ref]:
    """Returns shared memory and barriers of a `SumsReader`, by the names of its arguments."""
    return {
        'x_TxR': matrix(TILE, features),
        'xt_RxT': plgpu.SMEM((features, TILE), jnp.bfloat16),
        'moment_QxR': matrix(3 * features, features),
        'halves': matrix(SLOTS, ROWS * GROUP, TILE),
        'ready': plgpu.Barrier(num_arrivals=3),
        'arrived': plgpu.Barrier(num_barriers=SLOTS),
    }


class TilePlace(NamedTuple):
    """The tile of a thread block: its head, its number inside its block, the block and the tokens."""

    head: jax.Array
    inside: jax.Array
    block: jax.Array
    tokens: pl.Slice | slice

    @classmethod
    def find(cls, tile: jax.Array, tiles: int) -> 'TilePlace':
        """Finds the place of the tile with number `tile` in the sequence; a block has `tiles`."""
        head = lax.axis_index('head')
        return cls(head, lax.rem(tile, tiles), lax.div(tile, tiles), pl.ds(tile * TILE, TILE))


class SumsReader:
    """One tile of tokens and the sums over the tokens of other blocks, from the first copy on."""

    def __init__(
        self,
        far: FarTokens[Ref],
        place: TilePlace,
        *,
        x_TxR: Ref,
        xt_RxT: Ref,
        moment_QxR: Ref,
        halves: Ref,
        ready: Ref,
        arrived: Ref,
    ):
        """Starts the copies of `far` to the memory of `allocate_reader`; x, xᵀ and the moment arrive at `ready`."""
        head, tokens = place.head, place.tokens
        self.features = x_TxR.shape[1]
        self.x_TxR, self.xt_RxT, self.moment_QxR = x_TxR, xt_RxT, moment_QxR
        self.halves, self.ready, self.arrived = halves, ready, arrived
        self.state = far.state.at[head, place.block]
        plgpu.copy_gmem_to_smem(far.x_NxLxR.at[head, tokens], x_TxR, ready)
        plgpu.copy_gmem_to_smem(far.xt_NxRxL.at[head, :, tokens], xt_RxT, ready)
        plgpu.copy_gmem_to_smem(far.moment.at[head, place.block], moment_QxR, ready)
        for half in range(SLOTS - 1):
            self._fetch(jnp.int32(half))

    def _fetch(self, half: jax.Array) -> None:
        slot = lax.rem(half, SLOTS)
        plgpu.copy_gmem_to_smem(self.state.at[half], self.halves.at[slot], self.arrived.at[slot])

    def wait(self) -> None:
        """Waits for all copies except the squares."""
        plgpu.barrier_wait(self.ready)

    def multiply_moment(self) -> jax.Array:
        """Computes moment · x, float32 [TILE, R]."""
        size = self.features
        parts = [self.moment_QxR.at[i * size : (i + 1) * size] for i in range(3)]
        return sum_products([(self.x_TxR, part) for part in parts])[0]

    def multiply_squares(self, sum_TxD: Ref | None = None, g_TxD: Ref | None = None) -> list[jax.Array]:
        """Adds ⟨x ⊗ x, Z⟩ to an accumulator, or differentiates such sums, or both.

        Args:
            sum_TxD: accumulator of Σ_ij x_i x_j Z_ij, or None.
            g_TxD: gradients of numerators in shared memory, or None.

        Returns:
            With g, Σ_i x_i ⟨Z_ij, g⟩ for the features j of each group, half of the gradient: float32 [TILE, 16] each.
        """
        groups, count = self.features // GROUP, self.state.shape[0]

        def use(halves_before, column, x_TxG, with_sum, i, gradient_TxG):
            half = halves_before + i
            slot = lax.rem(half, SLOTS)
            z_SxD, rows = self.halves.at[slot], self.xt_RxT.at[pl.ds(i * ROWS, ROWS)]
            plgpu.barrier_wait(self.arrived.at[slot])
            if with_sum:
                weight = jnp.where(i < 2 * column, 2.0, 1.0).astype(jnp.bfloat16)
                for j in range(ROWS * GROUP // SLICE):
                    phi_TxS = multiply_features(x_TxG * weight, rows, j)
                    multiply(sum_TxD, phi_TxS, z_SxD.at[j * SLICE : (j + 1) * SLICE])
            if g_TxD is not None:
                dphi_TxS = product(g_TxD, z_SxD.transpose((1, 0)))
                for j in range(ROWS):
                    part_TxG = dphi_TxS[:, j * GROUP : (j + 1) * GROUP]
                    gradient_TxG += repeat_per_row(load_rows(rows.at[j]).astype(jnp.float32), GROUP) * part_TxG

            # If products were in flight until the next round, the compiler would overlap none with the code after it.
            plgpu.wgmma_wait(0)

            @pl.when(half + SLOTS - 1 < count)
            def _():
                release()
                self._fetch(half + SLOTS - 1)

            return gradient_TxG

        halves_before, gradients = 0, []
        for column in range(groups):
            x_TxG = load_matrix(self.x_TxR)[:, column * GROUP : (column + 1) * GROUP]
            gradient_TxG = zeros(TILE, GROUP)
            # Mirror images, below the diagonal, are in the sum already.
            summed = 0 if sum_TxD is None else 2 * (column + 1)
            last = summed if g_TxD is None else 2 * groups
            for with_sum, start, stop in ((True, 0, summed), (False, summed, last)):
                if start < stop:
                    body = functools.partial(use, halves_before, column, x_TxG, with_sum)
                    gradient_TxG = lax.fori_loop(start, stop, body, gradient_TxG)
            halves_before += last
            gradients.append(gradient_TxG)
        release()
        return gradients
