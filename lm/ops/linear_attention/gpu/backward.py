"""The backward kernels of causal linear attention on Hopper GPUs.

g = do / denominator and e = -⟨do, o⟩ / denominator are the gradients of numerator and denominator. A query meets the
sums over earlier keys that the forward pass left; a key y with value v meets the later queries in Σ (x ⊗ x) gᵀ and
Σ e x xᵀ. Other letters are explained in the forward kernels.
"""

import functools
from collections.abc import Callable
from typing import Generic, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.gpu import (
    accumulator,
    load_columns,
    load_rows,
    matrix,
    multiply,
    product,
    repeat_per_column,
    repeat_per_row,
    walk,
    write,
)
from lm.ops.linear_attention.gpu.features import mask, weigh
from lm.ops.linear_attention.gpu.plan import TILE, A, FarTokens, GpuPlan, NearTokens, Ref
from lm.ops.linear_attention.gpu.squares import SumsReader, TilePlace, allocate_reader


class SideGradients(NamedTuple, Generic[A]):
    """The gradients of queries, or of keys and values.

    Attributes:
        values: None for queries.
        features: the gradient of x or y.
        compared: the gradient of a or b; None where plan.exact_local is not set.
    """

    values: A | None
    features: A
    compared: A | None


def differentiate_queries(
    plan: GpuPlan, near: NearTokens[jax.Array], far: FarTokens[jax.Array] | None
) -> SideGradients[jax.Array]:
    """Computes the gradients of x and, where plan.exact_local, of a.

    Args:
        near: the operands of weights inside a block, queries first.
        far: queries, and the sums before each block with mirror images; None with plan.single_block.
    """
    own = near.own_NxLxC
    gradients = SideGradients(None, own if far is None else far.x_NxLxR, own if plan.exact_local else None)
    return _call(plan, _query_kernel, 'query', near, far, gradients)


def differentiate_keys(
    plan: GpuPlan, near: NearTokens[jax.Array], far: FarTokens[jax.Array] | None
) -> SideGradients[jax.Array]:
    """Computes the gradients of v, of y and, where plan.exact_local, of b.

    Args:
        near: the operands of weights inside a block, keys first.
        far: keys, and Σ (x ⊗ x) gᵀ and Σ e x xᵀ after each block with mirror images; None with plan.single_block.
    """
    own = near.own_NxLxC
    gradients = SideGradients(near.v_NxLxD, own if far is None else far.x_NxLxR, own if plan.exact_local else None)
    return _call(plan, _key_kernel, 'key', near, far, gradients)


def _call(
    plan: GpuPlan,
    kernel: Callable,
    name: str,
    near: NearTokens[jax.Array],
    far: FarTokens[jax.Array] | None,
    gradients: SideGradients[jax.Array],
) -> SideGradients[jax.Array]:
    """Runs a kernel; `gradients` are arrays like the results.

    In its memory `compared_TxC` holds the vectors of a tile that weights compare, `vector_TxD` g of queries or v of
    keys; both arrive at `ready`. `e_T` holds e of queries, which arrives at `e_ready`.
    """
    n, length, size = near.own_NxLxC.shape

    def body(*refs, **memory):
        kernel(plan, *refs, **memory)

    body.__name__ = f'linear_attention_{name}_gradients'
    (results,) = plgpu.kernel(
        body,
        out_type=(jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), gradients),),
        grid=(length // TILE, n),
        grid_names=('tile', 'head'),
        scratch_types={
            'compared_TxC': matrix(TILE, size),
            'vector_TxD': matrix(TILE, TILE),
            'ready': plgpu.Barrier(num_arrivals=2),
            'e_T': plgpu.SMEM((TILE,), jnp.float32),
            'e_ready': plgpu.Barrier(),
        },
    )(near, far)
    return results


def _query_kernel(
    plan: GpuPlan,
    near: NearTokens[Ref],
    far: FarTokens[Ref] | None,
    gradients: SideGradients[Ref],
    *,
    compared_TxC: Ref,
    vector_TxD: Ref,
    ready: Ref,
    e_T: Ref,
    e_ready: Ref,
) -> None:
    # The last tiles come first: in long blocks they have the most keys.
    place = TilePlace.find(near.own_NxLxC.shape[1] // TILE - 1 - lax.axis_index('tile'), plan.tiles)
    head, tokens, a_TxC, g_TxD = place.head, place.tokens, compared_TxC, vector_TxD
    plgpu.copy_gmem_to_smem(near.own_NxLxC.at[head, tokens], a_TxC, ready)
    plgpu.copy_gmem_to_smem(cast(Ref, near.g_NxLxD).at[head, tokens], g_TxD, ready)
    plgpu.copy_gmem_to_smem(cast(Ref, near.e_NxL).at[head, tokens], e_T, e_ready)
    plgpu.barrier_wait(ready)
    plgpu.barrier_wait(e_ready)

    def differentiate_inside(da_TxC):
        def add_keys(step, tiles, carry):
            b_smem, v_smem = tiles
            s_TxK = product(a_TxC, b_smem.transpose((1, 0)))
            dw_TxK = product(g_TxD, v_smem.transpose((1, 0))) + repeat_per_row(load_rows(e_T), TILE)
            _, slope_TxK = weigh(plan, s_TxK)
            ds_TxK = mask(dw_TxK * slope_TxK, (place.inside - step) * TILE, keys=1)
            multiply(da_TxC, ds_TxK.astype(jnp.bfloat16), b_smem)
            return carry

        sources = (near.other_NxLxC.at[head], near.v_NxLxD.at[head])
        walk(sources, place.block * plan.block, 0, place.inside + 1, add_keys)
        return plan.degree * plan.scale * da_TxC[...]

    def differentiate_before(far, **memory):
        reader = SumsReader(far, place, **memory)
        reader.wait()
        mx_TxR = reader.multiply_moment() * repeat_per_row(load_rows(e_T), reader.features)
        return 2.0 * (mx_TxR + jnp.concatenate(reader.multiply_squares(g_TxD=g_TxD), axis=1))

    inside = pl.run_scoped(differentiate_inside, accumulator(*a_TxC.shape))
    dx = _add_far(gradients, place, inside, differentiate_before, far)
    write(dx, gradients.features.at[head, tokens])


def _add_far(
    gradients: SideGradients[Ref],
    place: TilePlace,
    inside: jax.Array,
    differentiate_far: Callable[..., jax.Array],
    far: FarTokens[Ref] | None,
) -> jax.Array:
    """Returns the gradients of features from inside the block and from the sums over other blocks.

    Where a and b are separate arrays, gradients from inside the block are written as gradients of a and b.
    """
    total: jax.Array | float = inside
    if gradients.compared is not None:
        write(inside, gradients.compared.at[place.head, place.tokens])
        total = 0.0
    if far is not None:
        total = total + pl.run_scoped(
            functools.partial(differentiate_far, far), **allocate_reader(far.x_NxLxR.shape[2])
        )
    return cast(jax.Array, total)  # a plan with separate arrays has other blocks


def _key_kernel(
    plan: GpuPlan,
    near: NearTokens[Ref],
    far: FarTokens[Ref] | None,
    gradients: SideGradients[Ref],
    *,
    compared_TxC: Ref,
    vector_TxD: Ref,
    ready: Ref,
    **_: Ref,
) -> None:
    place = TilePlace.find(lax.axis_index('tile'), plan.tiles)
    head, tokens, b_TxC, v_TxD = place.head, place.tokens, compared_TxC, vector_TxD
    plgpu.copy_gmem_to_smem(near.own_NxLxC.at[head, tokens], b_TxC, ready)
    plgpu.copy_gmem_to_smem(near.v_NxLxD.at[head, tokens], v_TxD, ready)
    plgpu.barrier_wait(ready)

    def compute(dv_TxD):
        def differentiate_inside(db_TxC):
            def add_queries(step, tiles, carry):
                a_smem, g_smem, e_smem = tiles
                s_TxQ = product(b_TxC, a_smem.transpose((1, 0)))
                dw_TxQ = product(v_TxD, g_smem.transpose((1, 0))) + repeat_per_column(load_columns(e_smem), TILE)
                w_TxQ, slope_TxQ = weigh(plan, s_TxQ)
                shift = (step - place.inside) * TILE
                multiply(dv_TxD, mask(w_TxQ, shift, keys=0).astype(jnp.bfloat16), g_smem)
                ds_TxQ = mask(dw_TxQ * slope_TxQ, shift, keys=0)
                multiply(db_TxC, ds_TxQ.astype(jnp.bfloat16), a_smem)
                return carry

            sources = (near.other_NxLxC.at[head], cast(Ref, near.g_NxLxD).at[head], cast(Ref, near.e_NxL).at[head])
            walk(sources, place.block * plan.block, place.inside, plan.tiles, add_queries)
            return plan.degree * plan.scale * db_TxC[...]

        def differentiate_after(far, **memory):
            reader = SumsReader(far, place, **memory)
            reader.wait()
            my_TxR = reader.multiply_moment()
            return 2.0 * (my_TxR + jnp.concatenate(reader.multiply_squares(dv_TxD, v_TxD), axis=1))

        inside = pl.run_scoped(differentiate_inside, accumulator(*b_TxC.shape))
        dy = _add_far(gradients, place, inside, differentiate_after, far)
        return dv_TxD[...], dy

    dv_TxD, dy = pl.run_scoped(compute, accumulator(*v_TxD.shape))
    write(dv_TxD, cast(Ref, gradients.values).at[head, tokens])
    write(dy, gradients.features.at[head, tokens])
