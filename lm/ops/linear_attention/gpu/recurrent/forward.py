"""The forward kernel of recurrent linear attention on Hopper GPUs.

Letters are explained in the plan; here T are the tokens of a tile. x and y are the
features of queries and keys. A thread block walks over the tiles of one head with the sums of its slice in registers:

     num_i = a_i ⟨x_i, Z⟩ + Σ_{j ≤ i} w_ij v_j     Z ← a_T Z + Σ_j b_j y_j v_jᵀ     a_i = exp(t_i), b_j = exp(t_T - t_j)

t_i is the sum of the log factors of the tile's tokens up to i.
"""

from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.gpu import TILE, load_rows, matrix, repeat_per_row, send, sum_products, wait_for_copies, walk
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
from lm.ops.linear_attention.gpu.recurrent.sums import RunningSums, SumsCarry, SumsMemory


class OutputInputs(NamedTuple, Generic[A]):
    """Arrays of `outputs`.

    Attributes:
        queries: features of queries.
        keys: features of keys.
        rows: rows of the feature map; None without one.
        v: values, [B, L, K D] bfloat16.
        t: running sums of log factors, [N, L / segments] float32; None without decay.
        before: the sums before each segment; None with a single segment.
    """

    queries: SideArrays[A]
    keys: SideArrays[A]
    rows: MapRows[A] | None
    v: A
    t: A | None
    before: SegmentSums[A] | None


class SliceOutputs(NamedTuple, Generic[A]):
    """The parts of each slice. If there is one slice only, they are outputs and the inverse of denominators.

    Attributes:
        numerators: [S, B, L, H D].
        denominators: float32 [S, N, L / segments]; None without denominators.
    """

    numerators: A
    denominators: A | None


class _OutputTiles(NamedTuple):
    """The arrays that the walk copies tile by tile."""

    queries: SideSources
    keys: SideSources
    v_TxD: Ref
    t_T: Ref | None


class _OutputMemory(NamedTuple):
    """Shared memory of the kernel."""

    features: FeaturesMemory | None
    sums: SumsMemory
    numerator_TxD: Ref
    denominator_T: Ref
    register: list[Ref]


def outputs(plan: RecurrentPlan, inputs: OutputInputs[jax.Array]) -> SliceOutputs[jax.Array]:
    """Computes the part of each slice of numerators and denominators."""
    batch, length, _ = inputs.v.shape
    n = batch * plan.heads * plan.segments
    tokens = jax.ShapeDtypeStruct((plan.slices, n, length // plan.segments), jnp.float32)
    numerators = jax.ShapeDtypeStruct((plan.slices, batch, length, plan.heads * TILE), plan.part_type)
    results = SliceOutputs(numerators, tokens if plan.normalize else None)

    def linear_attention_recurrent_outputs(*refs):
        _outputs(plan, *refs)

    return plgpu.kernel(
        linear_attention_recurrent_outputs,
        out_type=(results,),
        grid=(plan.slices, n),
        grid_names=('slice', 'head'),
        compiler_params=FAST,
        scratch_types=[
            _OutputMemory(
                FeaturesMemory.allocate(plan, placed=(True, True)),
                SumsMemory.allocate(plan),
                matrix(TILE, TILE, dtype=plan.part_type),
                plgpu.SMEM((TILE,), jnp.float32),
                allocate_operand(plan.interpreted),
            )
        ],
    )(inputs)[0]


def _outputs(plan: RecurrentPlan, inputs: OutputInputs[Ref], results: SliceOutputs[Ref], memory: _OutputMemory) -> None:
    part, head = lax.axis_index('slice'), lax.axis_index('head')
    x, y = Features.load_sides(
        plan, [KernelSide(inputs.queries, True), KernelSide(inputs.keys, False)], inputs.rows, memory.features
    )

    def run(sums: RunningSums) -> None:
        def step(number, tiles: _OutputTiles, carry: SumsCarry) -> SumsCarry:
            tokens = pl.ds(number * TILE, TILE)
            factors = TileFactors.load(tiles.t_T)
            x_TxF, y_TxF = x.make(tiles.queries), y.make(tiles.keys)
            sums.place(carry)
            scores = [(a, b.transpose((1, 0))) for a, b in zip(x_TxF, y_TxF, strict=True)]
            s_TxK = sum_products(scores)[0]
            w_TxK = mask_weights(s_TxK, factors, keys=1)
            before = list(zip(x_TxF, sums.memory.placed, strict=True))
            inside = [(w_TxK.astype(inputs.v.dtype), tiles.v_TxD)]
            since_start = factors and factors.since_start
            num_TxD = accumulate_with_decay(before, inside, since_start, scratch=memory.register)
            wait_for_copies()
            if results.denominators is not None:
                before_T = sums.multiply_totals(carry, x_TxF)
                before_T = before_T if since_start is None else before_T * since_start
                den_T = before_T + jnp.sum(w_TxK, axis=1)
                if plan.slices == 1:
                    den_T = invert_denominators(plan, den_T)
                    num_TxD = num_TxD * repeat_per_row(den_T, TILE)
                send(den_T, memory.denominator_T, results.denominators.at[part, head, tokens])
            send(num_TxD, memory.numerator_TxD, plan.slice_part(results.numerators).at[tokens])
            return sums.advance(carry, y_TxF, tiles.v_TxD, factors, factors and factors.until_end)

        v, t = plan.slice_head(inputs.v), None if inputs.t is None else inputs.t.at[head]
        sources = _OutputTiles(x.sources, y.sources, v, t)
        walk(sources, 0, 0, v.shape[0] // TILE, step, sums.start(inputs.before), slots=SLOTS)

    RunningSums.run(plan, memory.sums, run)
    plgpu.wait_smem_to_gmem(0)


def invert_denominators(plan: RecurrentPlan, den: jax.Array) -> jax.Array:
    """Computes 1 / (den + bias), and 0 for tokens after the last.

    These have no keys and, with a bias of 0, no denominators either.
    """
    total = den + plan.denominator_bias
    return jnp.where(total == 0.0, 0.0, 1.0 / total)


class SumInputs(NamedTuple, Generic[A]):
    """Arrays of `sum_segments`.

    Attributes:
        side: features of keys; in the backward pass features of queries.
        rows: rows of the feature map; None without one.
        v: values, [B, L, K D] bfloat16; in the backward pass g of queries.
        e: [N, L / segments] float32 in the backward pass with plan.normalize; else None.
        t: running sums of log factors, [N, L / segments] float32; None without decay.
    """

    side: SideArrays[A]
    rows: MapRows[A] | None
    v: A
    e: A | None
    t: A | None


class _SumTiles(NamedTuple):
    """The arrays that the walk copies tile by tile."""

    side: SideSources
    v_TxD: Ref
    e_T: Ref | None
    t_T: Ref | None


class _SumMemory(NamedTuple):
    """Shared memory of the kernel."""

    features: FeaturesMemory | None
    sums: SumsMemory
    state_FxD: Ref
    totals_F: Ref


def sum_segments(plan: RecurrentPlan, inputs: SumInputs[jax.Array], backwards: bool = False) -> SegmentSums[jax.Array]:
    """Computes the sums over the tokens of each segment, decayed up to its end; `backwards` up to its start."""
    n, chunks = inputs.v.shape[0] * plan.heads * plan.segments, plan.slices * plan.chunks
    totals = jax.ShapeDtypeStruct((n, chunks, CHUNK), jnp.float32)
    results = SegmentSums(
        jax.ShapeDtypeStruct((n, chunks, CHUNK, TILE), jnp.float32), totals if plan.normalize else None
    )

    def linear_attention_recurrent_sums(*refs):
        _sum_segments(plan, backwards, *refs)

    return plgpu.kernel(
        linear_attention_recurrent_sums,
        out_type=(results,),
        grid=(plan.slices, n),
        grid_names=('slice', 'head'),
        compiler_params=FAST,
        scratch_types=[
            _SumMemory(
                FeaturesMemory.allocate(plan, placed=(True,)),
                SumsMemory.allocate(plan),
                matrix(CHUNK, TILE, dtype=jnp.float32),
                plgpu.SMEM((CHUNK,), jnp.float32),
            )
        ],
    )(inputs)[0]


def _sum_segments(
    plan: RecurrentPlan, backwards: bool, inputs: SumInputs[Ref], results: SegmentSums[Ref], memory: _SumMemory
) -> None:
    part, head = lax.axis_index('slice'), lax.axis_index('head')
    (y,) = Features.load_sides(plan, [KernelSide(inputs.side, backwards)], inputs.rows, memory.features)

    def run(sums: RunningSums) -> None:
        def step(number, tiles: _SumTiles, carry: SumsCarry) -> SumsCarry:
            factors = TileFactors.load(tiles.t_T)
            weight_T = factors and (factors.since_start if backwards else factors.until_end)
            more_T = None if tiles.e_T is None else load_rows(tiles.e_T)
            return sums.advance(carry, y.make(tiles.side), tiles.v_TxD, factors, weight_T, more_T)

        v, (e, t) = plan.slice_head(inputs.v), jax.tree.map(lambda a: a.at[head], (inputs.e, inputs.t))
        sources, count = _SumTiles(y.sources, v, e, t), v.shape[0] // TILE
        carry = walk(sources, 0, 0, count, step, sums.start(None), backwards, SLOTS)
        for c in range(plan.chunks):
            wait_for_copies()
            send(sums.read(carry, c), memory.state_FxD, results.state.at[head, part * plan.chunks + c])
            if results.totals is not None:
                send(carry.totals[c], memory.totals_F, results.totals.at[head, part * plan.chunks + c])

    RunningSums.run(plan, memory.sums, run)
    plgpu.wait_smem_to_gmem(0)
