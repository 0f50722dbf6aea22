"""The backward kernels of recurrent linear attention on Hopper GPUs.

g and e are the gradients of numerator and denominator. Queries meet the sums over earlier keys, which are formed again.
Keys meet the sums R = Σ x gᵀ and Σ e x over later queries, in a walk from the last tile to the first. Other letters are
explained in the forward kernel.

A kernel forms the gradients of its *own* side, and sums up the *other* side.
"""

from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.gpu import (
    FAST,
    TILE,
    load_columns,
    load_rows,
    product,
    repeat_per_column,
    repeat_per_row,
    sum_products,
    wait_for_copies,
    walk,
)
from lm.ops.linear_attention.gpu.recurrent.factors import TileFactors, accumulate_with_decay, mask_weights
from lm.ops.linear_attention.gpu.recurrent.features import Features, FeaturesMemory
from lm.ops.linear_attention.gpu.recurrent.plan import (
    CHUNK,
    SLOTS,
    RecurrentArrays,
    RecurrentPlan,
    Ref,
    SideArrays,
)
from lm.ops.linear_attention.gpu.recurrent.results import Results, allocate_results, describe_results
from lm.ops.linear_attention.gpu.recurrent.sums import Carry, RunningSums


def differentiate_queries(plan: RecurrentPlan, inputs: RecurrentArrays[jax.Array]) -> SideArrays[jax.Array]:
    """Computes the gradients of queries, the own side of `inputs`; `plan` is the forward kernel's."""
    return _call(plan, TileGradients.differentiate_query, 'query', inputs)


def differentiate_keys(plan: RecurrentPlan, inputs: RecurrentArrays[jax.Array]) -> SideArrays[jax.Array]:
    """Computes the gradients of keys, the own side of `inputs`, and of values; `plan` is the forward kernel's."""
    return _call(plan, TileGradients.differentiate_key, 'key', inputs)


def _call(
    plan: RecurrentPlan, differentiate: Callable[['TileGradients'], None], name: str, inputs: RecurrentArrays[jax.Array]
) -> SideArrays[jax.Array]:
    is_key, g = name == 'key', cast(jax.Array, inputs.g)

    def body(inputs: RecurrentArrays[Ref], outputs: SideArrays[Ref], *, features, sums, staging):
        sides = [(inputs.own, not is_key), (cast(SideArrays, inputs.other), is_key)]
        own, other = Features.load_sides(plan, sides, inputs.rows, features)
        results = Results(plan, own, outputs, staging)

        def run(sums: RunningSums) -> None:
            def step(number, tiles: RecurrentArrays[Ref], carry: Carry) -> Carry:
                factors, features = TileFactors.load(tiles.t), other.make(cast(SideArrays, tiles.other))
                sums.place(carry)
                differentiate(TileGradients(tiles, results, number, features, factors, sums.placed, carry.totals))
                if not is_key:
                    return sums.advance(carry, features, tiles.v, factors, factors and factors.until_end)
                total_T = None if tiles.e is None else load_rows(tiles.e)
                return sums.advance(carry, features, tiles.g, factors, factors and factors.since_start, total_T)

            v, g = plan.slice_head(inputs.v), plan.slice_head(inputs.g)
            e, t = jax.tree.map(lambda a: a.at[lax.axis_index('head')], (inputs.e, inputs.t))
            sources = RecurrentArrays(own.sources, other.sources, None, v, g, e, t)
            walk(sources, 0, 0, v.shape[0] // TILE, step, sums.start(inputs.sums), is_key, SLOTS)

        RunningSums.run(plan, sums, run)
        plgpu.wait_smem_to_gmem(0)

    body.__name__ = f'linear_attention_recurrent_{name}_gradients'
    return plgpu.kernel(
        body,
        out_type=(describe_results(plan, g.shape, with_values=is_key),),
        grid=(plan.slices, g.shape[0] * plan.heads * plan.segments),
        grid_names=('slice', 'head'),
        compiler_params=FAST,
        scratch_types={
            'features': FeaturesMemory.allocate(plan, placed=(False, True)),
            'sums': RunningSums.allocate(plan),
            'staging': allocate_results(plan, with_values=is_key),
        },
    )(inputs)[0]


class TileGradients:
    """The gradients of a tile's queries, or of its keys and values, which are the own side."""

    def __init__(
        self,
        tile: RecurrentArrays[Ref],
        results: Results,
        number: jax.Array,
        other: list[Ref],
        factors: TileFactors | None,
        sums: list[Ref],
        totals: list[jax.Array] | None,
    ):
        """Stores the arguments.

        Args:
            tile: the tile's arrays, in shared memory.
            results: writes the gradients, and has the own features.
            other: the other side's features, a chunk each.
            sums: the sums over the other side's tokens before, `placed`.
            totals: sums of features alone, a number for each column of a chunk, in registers; None without e.
        """
        self.tile, self.results, self.number, self.other = tile, results, number, other
        self.factors, self.sums, self.totals = factors, sums, totals

    def differentiate_query(self) -> None:
        """Computes dx_i = a_i (Z g_i + e_i Σ y) + Σ_{j ≤ i} (⟨g_i, v_j⟩ + e_i) y_j, with decay."""
        tile, factors = self.tile, self.factors
        e_T = None if tile.e is None else load_rows(tile.e)
        dw_TxK = product(tile.g, tile.v.transpose((1, 0)))
        dw_TxK = dw_TxK if e_T is None else dw_TxK + repeat_per_row(e_T, TILE)
        ds_TxK = mask_weights(dw_TxK, factors, keys=1).astype(jnp.bfloat16)

        def differentiate(c: int) -> jax.Array:
            total = 0.0 if e_T is None else repeat_per_row(e_T, CHUNK) * self._repeat_total(c)
            before, inside = [(tile.g, self.sums[c].transpose((1, 0)))], [(ds_TxK, self.other[c])]
            return accumulate_with_decay(before, inside, factors and factors.since_start, total)

        wait_for_copies()
        self.results.send_features(self.number, tile.own, self._make_own, differentiate)

    def differentiate_key(self) -> None:
        """Computes the gradients of values and keys.

        dv_j = b_j ⟨y_j, R⟩ + Σ_{i ≥ j} w_ij g_i; dy_j = b_j (R v_j + Σ e x) + Σ_{i ≥ j} (⟨g_i, v_j⟩ + e_i) x_i.
        """
        tile, y_TxF, factor_T = self.tile, self._make_own(), self.factors and self.factors.until_end
        pairs = [(y, x.transpose((1, 0))) for x, y in zip(self.other, y_TxF, strict=True)]
        s_TxQ = sum_products(pairs)[0]
        w_TxQ = mask_weights(s_TxQ, self.factors, keys=0).astype(jnp.bfloat16)
        before = list(zip(y_TxF, self.sums, strict=True))
        dv_TxD = accumulate_with_decay(before, [(w_TxQ, tile.g)], factor_T)
        wait_for_copies()
        self.results.send_values(self.number, dv_TxD)
        dw_TxQ = product(tile.v, cast(Ref, tile.g).transpose((1, 0)))
        dw_TxQ = dw_TxQ if tile.e is None else dw_TxQ + repeat_per_column(load_columns(tile.e), TILE)
        ds_TxQ = mask_weights(dw_TxQ, self.factors, keys=0).astype(jnp.bfloat16)

        def differentiate(c: int) -> jax.Array:
            total = 0.0 if tile.e is None else self._repeat_total(c)
            before, inside = [(tile.v, self.sums[c].transpose((1, 0)))], [(ds_TxQ, self.other[c])]
            return accumulate_with_decay(before, inside, factor_T, total)

        self.results.send_features(self.number, tile.own, lambda: y_TxF, differentiate)

    def _make_own(self) -> list:
        """Returns the own features, in registers where they were not given."""
        return self.results.features.make(self.tile.own, placed=False)

    def _repeat_total(self, c: int) -> jax.Array:
        return repeat_per_column(cast(list, self.totals)[c], TILE)
