"""The forward kernel of recurrent linear attention on Hopper GPUs.

N heads of all sequences, S slices of C chunks of 64 features, T tokens of a tile, D head size, x and y the features of
queries and keys. A thread block walks over the tiles of one head with the sums of its slice in registers:

    num_i = a_i ⟨x_i, Z⟩ + Σ_{j ≤ i} w_ij v_j     Z ← a_T Z + Σ_j b_j y_j v_jᵀ     a_i = exp(t_i), b_j = exp(t_T - t_j)

with t_i the sum of the log factors of the tile's tokens up to i.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.gpu import TILE, load_rows, matrix, send, sent, together, walk
from lm.ops.linear_attention.gpu.features import spare
from lm.ops.linear_attention.gpu.recurrent.fading import Fading, masked, met
from lm.ops.linear_attention.gpu.recurrent.features import FAST, Features
from lm.ops.linear_attention.gpu.recurrent.plan import CHUNK, SLOTS, RecurrentPlan
from lm.ops.linear_attention.gpu.recurrent.sums import RunningSums


def outputs(plan: RecurrentPlan, queries: tuple, keys: tuple, rows: tuple, v, *more) -> list[jax.Array]:
    """Numerators float32 [S, N, L, D] and, where plan.normalize, denominators [S, N, L]: the part of each slice.

    Args:
        plan: what to compute.
        queries: arrays of `Features`.
        keys: arrays of `Features`.
        rows: those that both share.
        v: [N, L, D] bfloat16.
        more: t float32 [N, L] where plan.decay; then, where plan.segments > 1, the sums before each segment, float32
            [N, M / 64, 64, D] and, where plan.normalize, [N, M / 64, 64].
    """
    n, length, size = v.shape
    out = [jax.ShapeDtypeStruct((plan.slices, n, length, size), jnp.float32)]
    if plan.normalize:
        out.append(jax.ShapeDtypeStruct((plan.slices, n, length), jnp.float32))

    def linear_attention_recurrent_outputs(*refs):
        _outputs(plan, *refs)

    return plgpu.kernel(
        linear_attention_recurrent_outputs,
        out_type=out,
        grid=(plan.slices, n),
        grid_names=('slice', 'head'),
        compiler_params=FAST,
        scratch_types=[
            Features.scratch(plan, placed=(True, True)),
            RunningSums.scratch(plan),
            [matrix(TILE, size, dtype=jnp.float32), plgpu.SMEM((TILE,), jnp.float32)],
            spare(plan),
        ],
    )(*queries, *keys, *rows, v, *more)


def _outputs(plan: RecurrentPlan, *refs):
    *refs, features_scratch, state_scratch, (num_smem, den_smem), register = refs
    part, head, (count, shared) = lax.axis_index('slice'), lax.axis_index('head'), Features.arrays(plan)
    refs, (num, *den) = split(refs, len(refs) - 1 - plan.normalize)
    *sides, rows, (v, *t), before = split(refs, count, count, shared, 1 + plan.decay)
    x, y = Features.sides(plan, sides, rows, features_scratch)

    def run(sums: RunningSums):
        def step(number, tiles, carry):
            x_tiles, y_tiles, (v_TxD, *t) = split(tiles, len(x.sources), len(y.sources))
            tokens = pl.ds(number * TILE, TILE)
            fading = Fading(*t) if plan.decay else None
            x_TxF, y_TxF = x.tile(x_tiles), y.tile(y_tiles)
            sums.place(carry)
            scores = [(a, b.transpose((1, 0))) for a, b in zip(x_TxF, y_TxF, strict=True)]
            s_TxK = together(scores)[0]
            w_TxK = masked(s_TxK, fading, keys=1)
            before, inside = list(zip(x_TxF, sums.placed, strict=True)), [(w_TxK.astype(v.dtype), v_TxD)]
            num_TxD = met(before, inside, fading and fading.since_start, spare=register)
            sent()
            if den:
                before_T = sums.read_totals(carry, x_TxF)
                before_T = before_T if fading is None else before_T * fading.since_start
                send(before_T + jnp.sum(w_TxK, axis=1), den_smem, den[0].at[part, head, tokens])
            send(num_TxD, num_smem, num.at[part, head, tokens])
            return sums.advance(carry, y_TxF, v_TxD, fading, fading and fading.until_end)

        sources = [*x.sources, *y.sources, *(a.at[head] for a in (v, *t))]
        walk(sources, 0, 0, v.shape[1] // TILE, step, sums.start(before), slots=SLOTS)

    RunningSums.run(plan, state_scratch, run)
    plgpu.wait_smem_to_gmem(0)


def sums(plan: RecurrentPlan, features: tuple, rows: tuple, v, *more, backwards: bool = False) -> list[jax.Array]:
    """Over the tokens of each segment: float32 [N, M / 64, 64, D] and, where plan.normalize, [N, M / 64, 64].

    Args:
        plan: what to compute.
        features: arrays of `Features`, of keys, or backwards of queries.
        rows: its other ones.
        v: [N, L, D] bfloat16, of queries g.
        more: e float32 [N, L] where plan.normalize, backwards only; t where plan.decay.
        backwards: as of the segment's start, not its end.
    """
    chunks = plan.slices * plan.chunks
    out = [jax.ShapeDtypeStruct((v.shape[0], chunks, CHUNK, v.shape[2]), jnp.float32)]
    if plan.normalize:
        out.append(jax.ShapeDtypeStruct((v.shape[0], chunks, CHUNK), jnp.float32))

    def linear_attention_recurrent_sums(*refs):
        _sums(plan, backwards, *refs)

    return plgpu.kernel(
        linear_attention_recurrent_sums,
        out_type=out,
        grid=(plan.slices, v.shape[0]),
        grid_names=('slice', 'head'),
        compiler_params=FAST,
        scratch_types=[
            Features.scratch(plan, placed=(True,)),
            RunningSums.scratch(plan),
            [matrix(CHUNK, v.shape[2], dtype=jnp.float32), plgpu.SMEM((CHUNK,), jnp.float32)],
        ],
    )(*features, *rows, v, *more)


def _sums(plan: RecurrentPlan, backwards: bool, *refs):
    *refs, features_scratch, state_scratch, (state_smem, total_smem) = refs
    part, head, counts = lax.axis_index('slice'), lax.axis_index('head'), Features.arrays(plan)
    refs, outputs = split(refs, len(refs) - 1 - plan.normalize)
    features, rows, per_token = split(refs, *counts)
    (y,) = Features.sides(plan, [features], rows, features_scratch)

    def run(sums: RunningSums):
        def step(number, tiles, carry):
            y_tiles, (v_TxD,), e, t = split(tiles, len(y.sources), 1, plan.normalize and backwards)
            fading = Fading(*t) if plan.decay else None
            weight_T = fading and (fading.since_start if backwards else fading.until_end)
            more_T = load_rows(e[0]) if e else None
            return sums.advance(carry, y.tile(y_tiles), v_TxD, fading, weight_T, more_T)

        sources = [*y.sources, *(a.at[head] for a in per_token)]
        carry = walk(sources, 0, 0, per_token[0].shape[1] // TILE, step, sums.start([]), backwards, SLOTS)
        for c in range(plan.chunks):
            sent()
            send(sums.sums(carry, c), state_smem, outputs[0].at[head, part * plan.chunks + c])
            if plan.normalize:
                send(carry[1][c], total_smem, outputs[1].at[head, part * plan.chunks + c])

    RunningSums.run(plan, state_scratch, run)
    plgpu.wait_smem_to_gmem(0)


def split(items, *counts: int) -> list[list]:
    """So many of them each, and the rest."""
    parts, items = [], list(items)
    for count in counts:
        parts.append(items[:count])
        items = items[count:]
    return [*parts, items]
