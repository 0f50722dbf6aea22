"""The forward kernel of recurrent linear attention on Hopper GPUs.

Letters are explained in the plan; here T are the tokens of a tile. x and y are the
features of queries and keys. A thread block walks over the tiles of one head with the sums of its slice in registers:

     num_i = a_i ⟨x_i, Z⟩ + Σ_{j ≤ i} w_ij v_j     Z ← a_T Z + Σ_j b_j y_j v_jᵀ     a_i = exp(t_i), b_j = exp(t_T - t_j)

t_i is the sum of the log factors of the tile's tokens up to i.
"""

from typing import cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.gpu import FAST, TILE, load_rows, matrix, repeat_per_row, send, sum_products, wait_for_copies, walk
from lm.ops.linear_attention.gpu.recurrent.factors import TileFactors, accumulate_with_decay, mask_weights
from lm.ops.linear_attention.gpu.recurrent.features import Features, FeaturesMemory
from lm.ops.linear_attention.gpu.recurrent.plan import (
    CHUNK,
    SLOTS,
    RecurrentArrays,
    RecurrentPlan,
    Ref,
    SegmentSums,
    SideArrays,
)
from lm.ops.linear_attention.gpu.recurrent.sums import Carry, RunningSums


def outputs(plan: RecurrentPlan, inputs: RecurrentArrays[jax.Array]) -> tuple[jax.Array, jax.Array | None]:
    """Computes the part of each slice of numerators and denominators; queries are the own side of `inputs`.

    Returns:
        (numerators, denominators): [S, B, L, H D], and float32 [S, N, T] or None without denominators. If there is one
        slice only, they are outputs and the inverse of denominators.
    """
    batch, length, _ = inputs.v.shape
    n = batch * plan.heads * plan.segments
    tokens = jax.ShapeDtypeStruct((plan.slices, n, length // plan.segments), jnp.float32)
    numerators = jax.ShapeDtypeStruct((plan.slices, batch, length, plan.heads * TILE), plan.part_type)

    def linear_attention_recurrent_outputs(*refs, **memory):
        _outputs(plan, *refs, **memory)

    return plgpu.kernel(
        linear_attention_recurrent_outputs,
        out_type=(numerators, tokens if plan.normalize else None),
        grid=(plan.slices, n),
        grid_names=('slice', 'head'),
        compiler_params=FAST,
        scratch_types={
            'features': FeaturesMemory.allocate(plan, placed=(True, True)),
            'sums': RunningSums.allocate(plan),
            'numerator_TxD': matrix(TILE, TILE, dtype=plan.part_type),
            'denominator_T': plgpu.SMEM((TILE,), jnp.float32),
        },
    )(inputs)


def _outputs(
    plan: RecurrentPlan,
    inputs: RecurrentArrays[Ref],
    numerators: Ref,
    denominators: Ref | None,
    *,
    features: FeaturesMemory,
    sums: tuple[list[Ref], Ref | None],
    numerator_TxD: Ref,
    denominator_T: Ref,
) -> None:
    part, head = lax.axis_index('slice'), lax.axis_index('head')
    x, y = Features.load_sides(
        plan, [(inputs.own, True), (cast(SideArrays, inputs.other), False)], inputs.rows, features
    )

    def run(sums: RunningSums) -> None:
        def step(number, tiles: RecurrentArrays[Ref], carry: Carry) -> Carry:
            tokens = pl.ds(number * TILE, TILE)
            factors = TileFactors.load(tiles.t)
            x_TxF, y_TxF = x.make(tiles.own), y.make(cast(SideArrays, tiles.other))
            sums.place(carry)
            scores = [(a, b.transpose((1, 0))) for a, b in zip(x_TxF, y_TxF, strict=True)]
            s_TxK = sum_products(scores)[0]
            w_TxK = mask_weights(s_TxK, factors, keys=1)
            before = list(zip(x_TxF, sums.placed, strict=True))
            inside = [(w_TxK.astype(inputs.v.dtype), tiles.v)]
            since_start = factors and factors.since_start
            num_TxD = accumulate_with_decay(before, inside, since_start)
            wait_for_copies()
            if denominators is not None:
                before_T = sums.multiply_totals(carry, x_TxF)
                before_T = before_T if since_start is None else before_T * since_start
                den_T = before_T + jnp.sum(w_TxK, axis=1)
                if plan.slices == 1:
                    den_T = invert_denominators(plan, den_T)
                    num_TxD = num_TxD * repeat_per_row(den_T, TILE)
                send(den_T, denominator_T, denominators.at[part, head, tokens])
            send(num_TxD, numerator_TxD, plan.slice_part(numerators).at[tokens])
            return sums.advance(carry, y_TxF, tiles.v, factors, factors and factors.until_end)

        v, t = plan.slice_head(inputs.v), None if inputs.t is None else inputs.t.at[head]
        sources = RecurrentArrays(x.sources, y.sources, None, v, t=t)
        walk(sources, 0, 0, v.shape[0] // TILE, step, sums.start(inputs.sums), slots=SLOTS)

    RunningSums.run(plan, sums, run)
    plgpu.wait_smem_to_gmem(0)


def invert_denominators(plan: RecurrentPlan, den: jax.Array) -> jax.Array:
    """Computes 1 / (den + bias), and 0 for tokens after the last.

    These have no keys and, with a bias of 0, no denominators either.
    """
    total = den + plan.denominator_bias
    return jnp.where(total == 0.0, 0.0, 1.0 / total)


def sum_segments(
    plan: RecurrentPlan, inputs: RecurrentArrays[jax.Array], backwards: bool = False
) -> SegmentSums[jax.Array]:
    """Computes the sums over the tokens of each segment, the own side of `inputs`, decayed up to its end.

    They are keys; in the backward pass queries, whose sums are decayed up to the start of the segment.
    """
    n, chunks = inputs.v.shape[0] * plan.heads * plan.segments, plan.slices * plan.chunks
    totals = jax.ShapeDtypeStruct((n, chunks, CHUNK), jnp.float32)
    results = SegmentSums(
        jax.ShapeDtypeStruct((n, chunks, CHUNK, TILE), jnp.float32), totals if plan.normalize else None
    )

    def linear_attention_recurrent_sums(*refs, **memory):
        _sum_segments(plan, backwards, *refs, **memory)

    return plgpu.kernel(
        linear_attention_recurrent_sums,
        out_type=(results,),
        grid=(plan.slices, n),
        grid_names=('slice', 'head'),
        compiler_params=FAST,
        scratch_types={
            'features': FeaturesMemory.allocate(plan, placed=(True,)),
            'sums': RunningSums.allocate(plan),
            'state_FxD': matrix(CHUNK, TILE, dtype=jnp.float32),
            'totals_F': plgpu.SMEM((CHUNK,), jnp.float32),
        },
    )(inputs)[0]


def _sum_segments(
    plan: RecurrentPlan,
    backwards: bool,
    inputs: RecurrentArrays[Ref],
    results: SegmentSums[Ref],
    *,
    features: FeaturesMemory,
    sums: tuple[list[Ref], Ref | None],
    state_FxD: Ref,
    totals_F: Ref,
) -> None:
    part, head = lax.axis_index('slice'), lax.axis_index('head')
    (y,) = Features.load_sides(plan, [(inputs.own, backwards)], inputs.rows, features)

    def run(sums: RunningSums) -> None:
        def step(number, tiles: RecurrentArrays[Ref], carry: Carry) -> Carry:
            factors = TileFactors.load(tiles.t)
            weight_T = factors and (factors.since_start if backwards else factors.until_end)
            more_T = None if tiles.e is None else load_rows(tiles.e)
            return sums.advance(carry, y.make(tiles.own), tiles.v, factors, weight_T, more_T)

        v, (e, t) = plan.slice_head(inputs.v), jax.tree.map(lambda a: a.at[head], (inputs.e, inputs.t))
        sources, count = RecurrentArrays(y.sources, None, None, v, e=e, t=t), v.shape[0] // TILE
        carry = walk(sources, 0, 0, count, step, sums.start(None), backwards, SLOTS)
        for c in range(plan.chunks):
            wait_for_copies()
            send(sums.read(carry, c), state_FxD, results.state.at[head, part * plan.chunks + c])
            if results.totals is not None and carry.totals is not None:
                send(carry.totals[c], totals_F, results.totals.at[head, part * plan.chunks + c])

    RunningSums.run(plan, sums, run)
    plgpu.wait_smem_to_gmem(0)
