"""The backward kernels of recurrent linear attention on Hopper GPUs.

g and e are the gradients of numerator and denominator. Queries meet the sums over earlier keys, which are formed again.
Keys meet the sums R = Σ x gᵀ and Σ e x over later queries, in a walk from the last tile to the first. Other letters are
explained in the forward kernel.

A kernel forms the gradients of its *own* side, and sums up the *other* side.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.gpu import (
    TILE,
    load_columns,
    load_rows,
    repeat_per_column,
    repeat_per_row,
    sum_products,
    wait_for_copies,
    walk,
)
from lm.ops.linear_attention.gpu.features import allocate_operand
from lm.ops.linear_attention.gpu.recurrent.factors import TileFactors, accumulate_with_decay, mask_weights
from lm.ops.linear_attention.gpu.recurrent.features import FAST, Features, FeaturesMemory, KernelSide, SideSources
from lm.ops.linear_attention.gpu.recurrent.plan import (
    CHUNK,
    SLOTS,
    A,
    MapRows,
    RecurrentPlan,
    Ref,
    SegmentSums,
    SideArrays,
)
from lm.ops.linear_attention.gpu.recurrent.results import Results, ResultsMemory, SideResults
from lm.ops.linear_attention.gpu.recurrent.sums import RunningSums, SumsCarry, SumsMemory


class GradientInputs(NamedTuple, Generic[A]):
    """Arrays of a backward kernel.

    Attributes:
        own: features of the own side.
        other: features of the other side.
        rows: rows of the feature map; None without one.
        v: values, [B, L, K D].
        g: gradients of numerators, [B, L, H D].
        e: gradients of denominators, [N, L / segments] float32; None without denominators.
        t: running sums of log factors, [N, L / segments] float32; None without decay.
        sums: for queries the sums before each segment, for keys the sums after it; None with a single segment.
    """

    own: SideArrays[A]
    other: SideArrays[A]
    rows: MapRows[A] | None
    v: A
    g: A
    e: A | None
    t: A | None
    sums: SegmentSums[A] | None


class _GradientTiles(NamedTuple):
    """The arrays that the walk copies tile by tile."""

    own: SideSources
    other: SideSources
    v_TxD: Ref
    g_TxD: Ref
    e_T: Ref | None
    t_T: Ref | None


class _GradientMemory(NamedTuple):
    """Shared memory of a kernel."""

    features: FeaturesMemory | None
    sums: SumsMemory
    results: ResultsMemory
    register: list[Ref]


@dataclasses.dataclass
class _Tile:
    """The arrays of one tile of a walk, in shared memory unless registers are mentioned.

    Attributes:
        number: the number of the tile.
        sources: sources of the own features.
        make_own: makes the own features, in registers where they were not given.
        other: the other side's features, a chunk each.
        v: values, [T, D].
        g: gradients of numerators, [T, D].
        e: gradients of denominators, [T]; None without denominators.
        factors: factors of decay; None without decay.
        sums: the sums over the other side's tokens before, `placed`.
        totals: sums of features alone, a number for each column of a chunk, in registers.
    """

    number: jax.Array
    sources: SideSources
    make_own: Callable[[], list]
    other: list
    v: Ref
    g: Ref
    e: Ref | None
    factors: TileFactors | None
    sums: list
    totals: list


def differentiate_queries(plan: RecurrentPlan, inputs: GradientInputs[jax.Array]) -> SideResults[jax.Array]:
    """Computes the gradients of queries, the own side of `inputs`; `plan` is the forward kernel's."""
    return _call(plan, _differentiate_query_tile, 'query', inputs)


def differentiate_keys(plan: RecurrentPlan, inputs: GradientInputs[jax.Array]) -> SideResults[jax.Array]:
    """Computes the gradients of keys, the own side of `inputs`, and of values; `plan` is the forward kernel's."""
    return _call(plan, _differentiate_key_tile, 'key', inputs)


def _call(
    plan: RecurrentPlan,
    differentiate_tile: Callable[[_Tile, Results, list], None],
    name: str,
    inputs: GradientInputs[jax.Array],
) -> SideResults[jax.Array]:
    is_key = name == 'key'

    def body(inputs: GradientInputs[Ref], outputs: SideResults[Ref], memory: _GradientMemory):
        sides = [KernelSide(inputs.own, not is_key), KernelSide(inputs.other, is_key)]
        own, other = Features.load_sides(plan, sides, inputs.rows, memory.features)
        results = Results(plan, own, outputs, memory.results, memory.register)

        def run(sums: RunningSums) -> None:
            def step(number, tiles: _GradientTiles, carry: SumsCarry) -> SumsCarry:
                factors, features = TileFactors.load(tiles.t_T), other.make(tiles.other)
                sums.place(carry)
                tile = _Tile(
                    number=number,
                    sources=tiles.own,
                    make_own=functools.partial(own.make, tiles.own, placed=False),
                    other=features,
                    v=tiles.v_TxD,
                    g=tiles.g_TxD,
                    e=tiles.e_T,
                    factors=factors,
                    sums=sums.memory.placed,
                    totals=carry.totals,
                )
                differentiate_tile(tile, results, memory.register)
                if not is_key:
                    return sums.advance(carry, features, tiles.v_TxD, factors, factors and factors.until_end)
                total_T = None if tiles.e_T is None else load_rows(tiles.e_T)
                return sums.advance(carry, features, tiles.g_TxD, factors, factors and factors.since_start, total_T)

            v, g = plan.slice_head(inputs.v), plan.slice_head(inputs.g)
            e, t = jax.tree.map(lambda a: a.at[lax.axis_index('head')], (inputs.e, inputs.t))
            sources = _GradientTiles(own.sources, other.sources, v, g, e, t)
            walk(sources, 0, 0, v.shape[0] // TILE, step, sums.start(inputs.sums), is_key, SLOTS)

        RunningSums.run(plan, memory.sums, run)
        plgpu.wait_smem_to_gmem(0)

    body.__name__ = f'linear_attention_recurrent_{name}_gradients'
    return plgpu.kernel(
        body,
        out_type=(SideResults.describe(plan, inputs.g.shape, with_values=is_key),),
        grid=(plan.slices, inputs.g.shape[0] * plan.heads * plan.segments),
        grid_names=('slice', 'head'),
        compiler_params=FAST,
        scratch_types=[
            _GradientMemory(
                FeaturesMemory.allocate(plan, placed=(False, True)),
                SumsMemory.allocate(plan),
                ResultsMemory.allocate(plan, with_values=is_key),
                allocate_operand(plan.interpreted),
            )
        ],
    )(inputs)[0]


def _differentiate_query_tile(tile: _Tile, results: Results, register: list) -> None:
    """Computes dx_i = a_i (Z g_i + e_i Σ y) + Σ_{j ≤ i} (⟨g_i, v_j⟩ + e_i) y_j, with decay."""
    e_T = None if tile.e is None else load_rows(tile.e)
    dw_TxK = sum_products([(tile.g, tile.v.transpose((1, 0)))])[0]
    dw_TxK = dw_TxK if e_T is None else dw_TxK + repeat_per_row(e_T, TILE)
    ds_TxK = mask_weights(dw_TxK, tile.factors, keys=1).astype(jnp.bfloat16)

    def differentiate(c: int) -> jax.Array:
        total = 0.0 if e_T is None else repeat_per_row(e_T, CHUNK) * repeat_per_column(tile.totals[c], TILE)
        before, inside = [(tile.g, tile.sums[c].transpose((1, 0)))], [(ds_TxK, tile.other[c])]
        return accumulate_with_decay(before, inside, tile.factors and tile.factors.since_start, total, register)

    wait_for_copies()
    results.send_features(tile.number, tile.sources, tile.make_own, differentiate)


def _differentiate_key_tile(tile: _Tile, results: Results, register: list) -> None:
    """Computes the gradients of values and keys.

    dv_j = b_j ⟨y_j, R⟩ + Σ_{i ≥ j} w_ij g_i; dy_j = b_j (R v_j + Σ e x) + Σ_{i ≥ j} (⟨g_i, v_j⟩ + e_i) x_i.
    """
    y_TxF, factor_T = tile.make_own(), tile.factors and tile.factors.until_end
    pairs = [(y, x.transpose((1, 0))) for x, y in zip(tile.other, y_TxF, strict=True)]
    s_TxQ = sum_products(pairs, scratch=register)[0]
    w_TxQ = mask_weights(s_TxQ, tile.factors, keys=0).astype(jnp.bfloat16)
    before = list(zip(y_TxF, tile.sums, strict=True))
    dv_TxD = accumulate_with_decay(before, [(w_TxQ, tile.g)], factor_T, scratch=register)
    wait_for_copies()
    results.send_values(tile.number, dv_TxD)
    dw_TxQ = sum_products([(tile.v, tile.g.transpose((1, 0)))])[0]
    dw_TxQ = dw_TxQ if tile.e is None else dw_TxQ + repeat_per_column(load_columns(tile.e), TILE)
    ds_TxQ = mask_weights(dw_TxQ, tile.factors, keys=0).astype(jnp.bfloat16)

    def differentiate(c: int) -> jax.Array:
        total = 0.0 if tile.e is None else repeat_per_column(tile.totals[c], TILE)
        before, inside = [(tile.v, tile.sums[c].transpose((1, 0)))], [(ds_TxQ, tile.other[c])]
        return accumulate_with_decay(before, inside, factor_T, total, register)

    results.send_features(tile.number, tile.sources, lambda: y_TxF, differentiate)
