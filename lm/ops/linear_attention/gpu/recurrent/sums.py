"""The sums over earlier tokens that the walks of the recurrent GPU kernels carry from tile to tile."""

from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.gpu import (
    TILE,
    accumulator,
    load_columns,
    load_matrix,
    matrix,
    repeat_per_column,
    repeat_per_row,
    sum_products,
    widen,
    zero_columns,
    zeros,
)
from lm.ops.linear_attention.gpu.recurrent.factors import TileFactors
from lm.ops.linear_attention.gpu.recurrent.plan import CHUNK, RecurrentPlan, Ref, SegmentSums

Carry = SegmentSums[list[jax.Array]]
"""The sums that a walk carries in registers."""


class RunningSums:
    """Z = Σ y vᵀ [64, D] for each chunk of a slice, and where plan.normalize Σ y [64]."""

    def __init__(self, plan: RecurrentPlan, placed: list[Ref], weighted: Ref | None, accumulators: tuple):
        self.plan, self.placed, self.weighted, self.accumulators = plan, placed, weighted, accumulators

    @staticmethod
    def allocate(plan: RecurrentPlan) -> tuple[list[Ref], Ref | None]:
        """Returns shared memory for Z of each chunk as an operand, and with decay for a tile's weighted values."""
        return [matrix(CHUNK, TILE) for _ in range(plan.chunks)], matrix(TILE, TILE) if plan.decay else None

    @staticmethod
    def run(
        plan: RecurrentPlan, memory: tuple[list[Ref], Ref | None], function: Callable[['RunningSums'], None]
    ) -> None:
        """Calls `function` with the sums over no tokens."""
        accumulators = [] if plan.carried else [accumulator(CHUNK, TILE) for _ in range(plan.chunks)]
        pl.run_scoped(lambda *accumulators: function(RunningSums(plan, *memory, accumulators)), *accumulators)

    def start(self, before: SegmentSums[Ref] | None) -> Carry:
        """Returns the first sums of a walk: the sums before each segment in memory, if there are any."""
        part, head = lax.axis_index('slice'), lax.axis_index('head')
        chunks = range(self.plan.chunks)
        state, totals = [zeros(CHUNK, TILE) for _ in chunks], [zero_columns(CHUNK) for _ in chunks]
        if before is not None:
            places = jax.tree.map(lambda a: [a.at[head, part * self.plan.chunks + c] for c in chunks], before)
            state = [load_matrix(place) for place in places.state]
            if places.totals is not None:
                totals = [load_columns(place) for place in places.totals]
        return SegmentSums(state if self.plan.carried else [], totals if self.plan.normalize else None)

    def place(self, carry: Carry) -> None:
        """Writes Z to shared memory as operands, `placed`."""
        for c, placed in enumerate(self.placed):
            placed[...] = self.read(carry, c).astype(placed.dtype)
        plgpu.commit_smem()

    def read(self, carry: Carry, c: int) -> jax.Array:
        """Returns Z of a chunk, float32."""
        return carry.state[c] if self.plan.carried else self.accumulators[c][...]

    def multiply_totals(self, carry: Carry, x_TxF: list) -> jax.Array:
        """Computes ⟨x, Σ y⟩, [T]."""
        parts = zip(x_TxF, cast(list, carry.totals), strict=True)
        return cast(jax.Array, sum(jnp.sum(widen(x) * repeat_per_column(total, TILE), axis=1) for x, total in parts))

    def advance(
        self,
        carry: Carry,
        y_TxF: list,
        v_TxD: Ref,
        factors: TileFactors | None,
        weight_T: jax.Array | None,
        more_T: jax.Array | None = None,
    ) -> Carry:
        """Computes the sums after the tokens of a tile.

        Args:
            carry: the sums before the tile.
            y_TxF: features, a chunk each, in shared memory.
            v_TxD: values, in shared memory.
            weight_T: a factor per token; None: 1.
            more_T: another factor per y; None: 1.
        """
        state, totals = carry
        if totals is not None:
            if more_T is None or weight_T is None:
                total_T = weight_T if more_T is None else more_T
            else:
                total_T = weight_T * more_T
            totals = [_decay(a, factors) + _sum(y, total_T) for a, y in zip(totals, y_TxF, strict=True)]
        if not self.plan.carried:
            for registers, y in zip(self.accumulators, y_TxF, strict=True):
                plgpu.wgmma(registers, y.transpose((1, 0)), v_TxD)
            return SegmentSums(state, totals)
        if self.weighted is not None and weight_T is not None:
            self.weighted[...] = (widen(v_TxD) * repeat_per_row(weight_T, TILE)).astype(self.weighted.dtype)
            plgpu.commit_smem()
            v_TxD = self.weighted
        added = sum_products(*([(y.transpose((1, 0)), v_TxD)] for y in y_TxF))
        return SegmentSums([_decay(a, factors) + b for a, b in zip(state, added, strict=True)], totals)


def _decay(sums: jax.Array, factors: TileFactors | None) -> jax.Array:
    return sums if factors is None else sums * factors.whole


def _sum(x_TxF, weight_T: jax.Array | None) -> jax.Array:
    """Computes Σ weight_i x_i over the tokens of a tile, a number for each column."""
    x = widen(x_TxF)
    return jnp.sum(x if weight_T is None else x * repeat_per_row(weight_T, x_TxF.shape[1]), axis=0)
