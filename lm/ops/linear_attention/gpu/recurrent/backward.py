"""The backward kernels of recurrent linear attention on Hopper GPUs.

g and e are the gradients of numerator and denominator. Queries meet the sums over earlier keys, which are formed again;
keys the sums R = Σ x gᵀ and Σ e x over later queries, in a walk from the last tile to the first. Letters as in the
forward kernel.

A kernel's *own* side is the one whose gradients it forms, the *other* one is summed up.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.gpu import TILE, by_column, by_row, load_columns, load_rows, sent, together, walk
from lm.ops.linear_attention.gpu.features import spare
from lm.ops.linear_attention.gpu.recurrent.fading import Fading, masked, met
from lm.ops.linear_attention.gpu.recurrent.features import FAST, Features
from lm.ops.linear_attention.gpu.recurrent.forward import split
from lm.ops.linear_attention.gpu.recurrent.plan import CHUNK, SLOTS, RecurrentPlan
from lm.ops.linear_attention.gpu.recurrent.results import Results
from lm.ops.linear_attention.gpu.recurrent.sums import RunningSums


def query_gradients(plan: RecurrentPlan, queries: tuple, keys: tuple, rows: tuple, v, g, *more) -> list[jax.Array]:
    """What `Results` says, of queries.

    Args:
        plan: the forward kernel's.
        queries: arrays of `Features`.
        keys: arrays of `Features`.
        rows: those that both share.
        v: [N, L, D].
        g: [N, L, D].
        more: e float32 [N, L] where plan.normalize, t where plan.decay; the sums before each segment.
    """
    return _call(plan, _query_step, 'query', queries, keys, rows, v, g, *more)


def key_gradients(plan: RecurrentPlan, queries: tuple, keys: tuple, rows: tuple, v, g, *more) -> list[jax.Array]:
    """What `Results` says, of keys, then the part of each slice of the gradient of v, float32 [S, N, L, D].

    Arguments as in `query_gradients`, but the sums are those after each segment.
    """
    return _call(plan, _key_step, 'key', keys, queries, rows, v, g, *more)


@dataclasses.dataclass
class _Tile:
    """What a walk has of one tile; in shared memory unless it says otherwise.

    Attributes:
        number: of the tile.
        sources: of the own features.
        own: makes the own features, in registers where they were not given.
        other: the other side's, a chunk each.
        v: [T, D].
        g: [T, D].
        e: [T], or None without denominators.
        fading: None without decay.
        sums: those over the other side's tokens before, `placed`.
        totals: of features alone, a number for each column of a chunk, in registers.
    """

    number: jax.Array
    sources: list
    own: Callable[[], list]
    other: list
    v: jax.Array
    g: jax.Array
    e: jax.Array | None
    fading: Fading | None
    sums: list
    totals: list


def _call(plan: RecurrentPlan, step_of, name: str, own, other, rows, v, *more) -> list[jax.Array]:
    (count, shared), is_key = Features.arrays(plan), name == 'key'
    out = Results.types(plan, v.shape, with_values=is_key)

    def body(*refs):
        *refs, features_scratch, state_scratch, results_scratch, register = refs
        refs, outputs = split(refs, len(refs) - len(out))
        *sides, rows, per_token, start = split(refs, count, count, shared, 2 + plan.normalize + plan.decay)
        own, other = Features.sides(plan, sides, rows, features_scratch)
        results = Results(plan, own, outputs, results_scratch, register)

        def run(sums: RunningSums):
            def step(number, tiles, carry):
                sources, others, (v, g), e, t = split(tiles, len(own.sources), len(other.sources), 2, plan.normalize)
                fading, features = Fading(*t) if plan.decay else None, other.tile(others)
                sums.place(carry)
                e = e[0] if e else None
                tile = _Tile(
                    number=number,
                    sources=sources,
                    own=functools.partial(own.tile, sources, placed=False),
                    other=features,
                    v=v,
                    g=g,
                    e=e,
                    fading=fading,
                    sums=sums.placed,
                    totals=carry[1],
                )
                step_of(tile, results, register)
                values, weight_T, total_T = v, fading and fading.until_end, None
                if is_key:
                    values, weight_T = g, fading and fading.since_start
                    total_T = None if e is None else load_rows(e)
                return sums.advance(carry, features, values, fading, weight_T, total_T)

            sources = [*own.sources, *other.sources, *(a.at[lax.axis_index('head')] for a in per_token)]
            walk(sources, 0, 0, v.shape[1] // TILE, step, sums.start(start), is_key, SLOTS)

        RunningSums.run(plan, state_scratch, run)
        plgpu.wait_smem_to_gmem(0)

    body.__name__ = f'linear_attention_recurrent_{name}_gradients'
    return plgpu.kernel(
        body,
        out_type=out,
        grid=(plan.slices, v.shape[0]),
        grid_names=('slice', 'head'),
        compiler_params=FAST,
        scratch_types=[
            Features.scratch(plan, placed=(False, True)),
            RunningSums.scratch(plan),
            Results.scratch(plan, with_values=is_key),
            spare(plan),
        ],
    )(*own, *other, *rows, v, *more)


def _query_step(tile: _Tile, results: Results, register: list) -> None:
    """dx_i = a_i (Z g_i + e_i Σ y) + Σ_{j ≤ i} (⟨g_i, v_j⟩ + e_i) y_j, faded."""
    e_T = None if tile.e is None else load_rows(tile.e)
    dw_TxK = together([(tile.g, tile.v.transpose((1, 0)))])[0]
    dw_TxK = dw_TxK if e_T is None else dw_TxK + by_row(e_T, TILE)
    ds_TxK = masked(dw_TxK, tile.fading, keys=1).astype(jnp.bfloat16)

    def gradient(c):
        total = 0.0 if e_T is None else by_row(e_T, CHUNK) * by_column(tile.totals[c], TILE)
        before, inside = [(tile.g, tile.sums[c].transpose((1, 0)))], [(ds_TxK, tile.other[c])]
        return met(before, inside, tile.fading and tile.fading.since_start, total, register)

    sent()
    results.send(tile.number, tile.sources, tile.own, gradient)


def _key_step(tile: _Tile, results: Results, register: list) -> None:
    """dv_j = b_j ⟨y_j, R⟩ + Σ_{i ≥ j} w_ij g_i; dy_j = b_j (R v_j + Σ e x) + Σ_{i ≥ j} (⟨g_i, v_j⟩ + e_i) x_i."""
    y_TxF, factor_T = tile.own(), tile.fading and tile.fading.until_end
    s_TxQ = together([(y, x.transpose((1, 0))) for x, y in zip(tile.other, y_TxF, strict=True)], spare=register)[0]
    w_TxQ = masked(s_TxQ, tile.fading, keys=0).astype(jnp.bfloat16)
    dv_TxD = met(list(zip(y_TxF, tile.sums, strict=True)), [(w_TxQ, tile.g)], factor_T, spare=register)
    sent()
    results.send_values(tile.number, dv_TxD)
    dw_TxQ = together([(tile.v, tile.g.transpose((1, 0)))])[0]
    dw_TxQ = dw_TxQ if tile.e is None else dw_TxQ + by_column(load_columns(tile.e), TILE)
    ds_TxQ = masked(dw_TxQ, tile.fading, keys=0).astype(jnp.bfloat16)

    def gradient(c):
        total = 0.0 if tile.e is None else by_column(tile.totals[c], TILE)
        before, inside = [(tile.v, tile.sums[c].transpose((1, 0)))], [(ds_TxQ, tile.other[c])]
        return met(before, inside, factor_T, total, register)

    results.send(tile.number, tile.sources, lambda: y_TxF, gradient)
