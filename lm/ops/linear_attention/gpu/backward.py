"""The backward kernels of causal linear attention on Hopper GPUs.

g = do / denominator and e = -⟨do, o⟩ / denominator are the gradients of numerator and denominator. A query meets the
sums over earlier keys that the forward pass left; a key y with value v meets the later queries in Σ (x ⊗ x) gᵀ and
Σ e x xᵀ. Letters as in the forward kernels.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.gpu import by_column, by_row, load_columns, load_rows, matrix, multiply, product, walk, write
from lm.ops.linear_attention.gpu import squares as pallas_gpu_squares
from lm.ops.linear_attention.gpu.features import masked, spare
from lm.ops.linear_attention.gpu.plan import TILE, GpuPlan
from lm.ops.powers import power_and_slope


def query_gradients(plan: GpuPlan, x, xt, a, b, v, g, e, moment=None, state=None) -> list[jax.Array]:
    """The gradients of x and, where plan.exact_local, of a.

    Args:
        plan: the forward kernels'.
        x: [N, L, R].
        xt: its transpose [N, R, L].
        a: [N, L, C], queries of the weights inside a block.
        b: [N, L, C], keys of them.
        v: [N, L, D].
        g: [N, L, D].
        e: float32 [N, L].
        moment: as in the forward pass.
        state: as in the forward pass, with the mirror images of the squares.
    """
    far = () if plan.single_block else (x, xt, moment, state)
    return _call(plan, _query_gradients, 'query', (a, b, v, g, e), far, [x, a] if plan.exact_local else [x])


def key_gradients(plan: GpuPlan, y, yt, a, b, v, g, e, moment=None, state=None) -> list[jax.Array]:
    """The gradients of v, of y and, where plan.exact_local, of b.

    Args:
        plan: the forward kernels'.
        y: [N, L, R].
        yt: its transpose [N, R, L].
        a: [N, L, C], queries of the weights inside a block.
        b: [N, L, C], keys of them.
        v: [N, L, D].
        g: [N, L, D].
        e: float32 [N, L].
        moment: Σ e x xᵀ after each block, as three bfloat16 parts.
        state: Σ (x ⊗ x) gᵀ after each block, bfloat16, with the mirror images of the squares.
    """
    far = () if plan.single_block else (y, yt, moment, state)
    # The kernel's own tile comes first, the ones that it walks over after it.
    return _call(plan, _key_gradients, 'key', (b, a, v, g, e), far, [v, y, b] if plan.exact_local else [v, y])


def _call(plan: GpuPlan, kernel, name: str, near, far, results) -> list[jax.Array]:
    n, length, size = near[0].shape

    def body(*refs):
        kernel(plan, *refs)

    body.__name__ = f'linear_attention_{name}_gradients'
    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in results],
        grid=(length // TILE, n),
        grid_names=('tile', 'head'),
        scratch_types=[
            spare(plan),
            [matrix(TILE, size), matrix(TILE, TILE), plgpu.Barrier(num_arrivals=2)],
            [plgpu.SMEM((TILE,), jnp.float32), plgpu.Barrier()],
        ],
    )(*near, *far)


def _query_gradients(plan: GpuPlan, a, b, v, g, e, *refs):
    *refs, register, (a_smem, g_smem, ready), (e_smem, e_ready) = refs
    far, results = ([], refs) if plan.single_block else (refs[:4], refs[4:])
    # The last tiles first: in long blocks they have the most keys.
    tile, head = a.shape[1] // TILE - 1 - lax.axis_index('tile'), lax.axis_index('head')
    inside, block = lax.rem(tile, plan.tiles), lax.div(tile, plan.tiles)
    tokens = pl.ds(tile * TILE, TILE)
    plgpu.copy_gmem_to_smem(a.at[head, tokens], a_smem, ready)
    plgpu.copy_gmem_to_smem(g.at[head, tokens], g_smem, ready)
    plgpu.copy_gmem_to_smem(e.at[head, tokens], e_smem, e_ready)
    plgpu.barrier_wait(ready)
    plgpu.barrier_wait(e_ready)

    def inside_block(da_TxC):
        def keys(step, tiles, carry):
            b_smem, v_smem = tiles
            s_TxK = product(a_smem, b_smem.transpose((1, 0)))
            dw_TxK = product(g_smem, v_smem.transpose((1, 0))) + by_row(load_rows(e_smem), TILE)
            _, slope_TxK = power_and_slope(s_TxK if plan.scale == 1.0 else plan.scale * s_TxK, plan.degree)
            ds_TxK = masked(dw_TxK * slope_TxK, (inside - step) * TILE, keys=1)
            multiply(da_TxC, ds_TxK.astype(jnp.bfloat16), b_smem, register)
            return carry

        walk((b.at[head], v.at[head]), block * plan.block, 0, inside + 1, keys)
        return plan.degree * plan.scale * da_TxC[...]

    def before(*scratch):
        meeting = pallas_gpu_squares.Meeting(*far, (head, tokens, block), scratch, register)
        meeting.wait()
        mx_TxR = meeting.times_moment() * by_row(load_rows(e_smem), meeting.features)
        return 2.0 * (mx_TxR + jnp.concatenate(meeting.squares(g=g_smem), axis=1))

    dx = pl.run_scoped(inside_block, plgpu.ACC(a_smem.shape, jnp.float32))
    if plan.exact_local:
        write(dx, results[1].at[head, tokens])
        dx = 0.0
    if not plan.single_block:
        dx = dx + pl.run_scoped(before, *pallas_gpu_squares.scratch(far[0].shape[2]))
    write(dx, results[0].at[head, tokens])


def _key_gradients(plan: GpuPlan, b, a, v, g, e, *refs):
    *refs, register, (b_smem, v_smem, ready), _ = refs
    far, results = ([], refs) if plan.single_block else (refs[:4], refs[4:])
    tile, head = lax.axis_index('tile'), lax.axis_index('head')
    inside, block = lax.rem(tile, plan.tiles), lax.div(tile, plan.tiles)
    tokens = pl.ds(tile * TILE, TILE)
    plgpu.copy_gmem_to_smem(b.at[head, tokens], b_smem, ready)
    plgpu.copy_gmem_to_smem(v.at[head, tokens], v_smem, ready)
    plgpu.barrier_wait(ready)

    def compute(dv_TxD):
        def inside_block(db_TxC):
            def queries(step, tiles, carry):
                a_smem, g_smem, e_smem = tiles
                s_TxQ = product(b_smem, a_smem.transpose((1, 0)))
                dw_TxQ = product(v_smem, g_smem.transpose((1, 0))) + by_column(load_columns(e_smem), TILE)
                w_TxQ, slope_TxQ = power_and_slope(s_TxQ if plan.scale == 1.0 else plan.scale * s_TxQ, plan.degree)
                shift = (step - inside) * TILE
                multiply(dv_TxD, masked(w_TxQ, shift, keys=0).astype(jnp.bfloat16), g_smem, register)
                ds_TxQ = masked(dw_TxQ * slope_TxQ, shift, keys=0)
                multiply(db_TxC, ds_TxQ.astype(jnp.bfloat16), a_smem, register)
                return carry

            walk((a.at[head], g.at[head], e.at[head]), block * plan.block, inside, plan.tiles, queries)
            return plan.degree * plan.scale * db_TxC[...]

        def after(*scratch):
            meeting = pallas_gpu_squares.Meeting(*far, (head, tokens, block), scratch, register)
            meeting.wait()
            my_TxR = meeting.times_moment()
            return 2.0 * (my_TxR + jnp.concatenate(meeting.squares(dv_TxD, v_smem), axis=1))

        dy = pl.run_scoped(inside_block, plgpu.ACC(b_smem.shape, jnp.float32))
        if plan.exact_local:
            write(dy, results[2].at[head, tokens])
            dy = 0.0
        if not plan.single_block:
            dy = dy + pl.run_scoped(after, *pallas_gpu_squares.scratch(far[0].shape[2]))
        return dv_TxD[...], dy

    dv_TxD, dy = pl.run_scoped(compute, plgpu.ACC(v_smem.shape, jnp.float32))
    write(dv_TxD, results[0].at[head, tokens])
    write(dy, results[1].at[head, tokens])
