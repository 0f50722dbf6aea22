"""What the walks of the recurrent GPU kernels carry from tile to tile: sums over the tokens before."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.gpu import TILE, by_column, by_row, load_columns, load_matrix, matrix, together, zero_columns, zeros
from lm.ops.linear_attention.gpu.recurrent.fading import Fading
from lm.ops.linear_attention.gpu.recurrent.features import widened
from lm.ops.linear_attention.gpu.recurrent.plan import CHUNK, RecurrentPlan


class RunningSums:
    """Z = Σ y vᵀ [64, D] for each chunk of a slice, and where plan.normalize Σ y [64]."""

    def __init__(self, plan: RecurrentPlan, scratch: list, accumulators: tuple):
        self.plan, self.accumulators = plan, accumulators
        self.placed, self._weighted = scratch

    @staticmethod
    def scratch(plan: RecurrentPlan) -> list:
        return [[matrix(CHUNK, TILE) for _ in range(plan.chunks)], [matrix(TILE, TILE)] if plan.decay else []]

    @staticmethod
    def run(plan: RecurrentPlan, scratch: list, function) -> None:
        """function(the sums over no tokens)."""
        accumulators = [] if plan.carried else [plgpu.ACC((CHUNK, TILE), jnp.float32) for _ in range(plan.chunks)]
        pl.run_scoped(lambda *accumulators: function(RunningSums(plan, scratch, accumulators)), *accumulators)

    def start(self, arrays: list) -> tuple:
        """What the walk carries at first: the sums [N, M / 64, …] before each segment in memory, if there are any."""
        part, head = lax.axis_index('slice'), lax.axis_index('head')
        chunks = range(self.plan.chunks)
        state, totals = [zeros(CHUNK, TILE) for _ in chunks], [zero_columns(CHUNK) for _ in chunks]
        if arrays:
            state, *more = ([a.at[head, part * self.plan.chunks + c] for c in chunks] for a in arrays)
            state = [load_matrix(a) for a in state]
            totals = [load_columns(a) for parts in more for a in parts]
        return state if self.plan.carried else [], totals if self.plan.normalize else []

    def place(self, carry: tuple) -> None:
        """Z as operands in shared memory, `placed`."""
        for c, placed in enumerate(self.placed):
            placed[...] = self.sums(carry, c).astype(placed.dtype)
        plgpu.commit_smem()

    def sums(self, carry: tuple, c: int) -> jax.Array:
        """Z of a chunk, float32."""
        return carry[0][c] if self.plan.carried else self.accumulators[c][...]

    def read_totals(self, carry: tuple, x_TxF: list) -> jax.Array:
        """⟨x, Σ y⟩, [T]."""
        parts = zip(x_TxF, carry[1], strict=True)
        return sum(jnp.sum(widened(x) * by_column(total, TILE), axis=1) for x, total in parts)

    def advance(self, carry: tuple, y_TxF: list, v_TxD, fading: Fading | None, weight_T, more_T=None) -> tuple:
        """What the walk carries after the tokens of a tile.

        Args:
            carry: what it carried before.
            y_TxF: features, a chunk each, in shared memory.
            v_TxD: in shared memory.
            fading: of the tile.
            weight_T: factors of each token; None: 1.
            more_T: factors of each y, beside it; None: 1.
        """
        state, totals = carry
        if self.plan.normalize:
            if more_T is None or weight_T is None:
                total_T = weight_T if more_T is None else more_T
            else:
                total_T = weight_T * more_T
            totals = [_faded(a, fading) + _summed(y, total_T) for a, y in zip(totals, y_TxF, strict=True)]
        if not self.plan.carried:
            for accumulator, y in zip(self.accumulators, y_TxF, strict=True):
                plgpu.wgmma(accumulator, y.transpose((1, 0)), v_TxD)
            return state, totals
        if fading is not None:
            (weighted,) = self._weighted
            weighted[...] = (widened(v_TxD) * by_row(weight_T, TILE)).astype(weighted.dtype)
            plgpu.commit_smem()
            v_TxD = weighted
        added = together(*([(y.transpose((1, 0)), v_TxD)] for y in y_TxF))
        return [_faded(a, fading) + b for a, b in zip(state, added, strict=True)], totals


def _faded(sums: jax.Array, fading: Fading | None) -> jax.Array:
    return sums if fading is None else sums * fading.whole


def _summed(x_TxF, weight_T: jax.Array | None) -> jax.Array:
    """Σ weight_i x_i over the tokens of a tile, a number for each column."""
    x = widened(x_TxF)
    return jnp.sum(x if weight_T is None else x * by_row(weight_T, x_TxF.shape[1]), axis=0)
