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

from lm.ops.linear_attention import pallas_gpu_squares
from lm.ops.linear_attention.pallas_gpu_features import (
    by_column,
    by_row,
    load_columns,
    load_rows,
    masked,
    matrix,
    multiply,
    power_and_slope,
    product,
    spare,
)
from lm.ops.linear_attention.pallas_gpu_plan import TILE, Plan


def query_gradients(plan: Plan, x, xt, a, b, v, g, e, moment=None, state=None) -> list[jax.Array]:
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
    far = () if plan.alone else (x, xt, moment, state)
    return _call(plan, _query_gradients, 'query', (a, b, v, g, e), far, [x, a] if plan.exact_local else [x])


def key_gradients(plan: Plan, y, yt, a, b, v, g, e, moment=None, state=None) -> list[jax.Array]:
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
    far = () if plan.alone else (y, yt, moment, state)
    # The kernel's own tile comes first, the ones that it walks over after it.
    return _call(plan, _key_gradients, 'key', (b, a, v, g, e), far, [v, y, b] if plan.exact_local else [v, y])


def _call(plan: Plan, kernel, name: str, near, far, results) -> list[jax.Array]:
    n, length, size = near[0].shape

    def body(*refs):
        kernel(plan, *refs)

    body.__name__ = f'linear_attention_{name}_gradients'
    # Of two tokens that meet, the query brings e.
    own, walked = [matrix(TILE, size), matrix(TILE, TILE)], [matrix(2, TILE, size), matrix(2, TILE, TILE)]
    if name == 'query':
        own.append(plgpu.SMEM((TILE,), jnp.float32))
    else:
        walked.append(plgpu.SMEM((2, TILE), jnp.float32))
    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in results],
        grid=(length // TILE, n),
        grid_names=('tile', 'head'),
        scratch_types=[
            pallas_gpu_squares.scratch(far[0].shape[2]) if far else [],
            spare(plan),
            [*own, plgpu.Barrier(num_arrivals=len(own))],
            [*walked, plgpu.Barrier(num_arrivals=len(walked), num_barriers=2)],
            [matrix(TILE, a.shape[2]) for a in results],
        ],
    )(*near, *far)


def _query_gradients(plan: Plan, a, b, v, g, e, *refs):
    *far, results, far_scratch, register, own, walked, staged = _grouped(plan, refs, 2 if plan.exact_local else 1)
    a_smem, g_smem, e_smem, own_ready = own
    b_smem, v_smem, ready = walked
    tile, head = lax.axis_index('tile'), lax.axis_index('head')
    inside, block = lax.rem(tile, plan.tiles), lax.div(tile, plan.tiles)
    tokens = pl.ds(tile * TILE, TILE)

    def fetch(step):
        keys = pl.ds(block * plan.block + step * TILE, TILE)
        slot = lax.rem(step, 2)
        plgpu.copy_gmem_to_smem(b.at[head, keys], b_smem.at[slot], ready.at[slot])
        plgpu.copy_gmem_to_smem(v.at[head, keys], v_smem.at[slot], ready.at[slot])

    plgpu.copy_gmem_to_smem(a.at[head, tokens], a_smem, own_ready)
    plgpu.copy_gmem_to_smem(g.at[head, tokens], g_smem, own_ready)
    plgpu.copy_gmem_to_smem(e.at[head, tokens], e_smem, own_ready)
    fetch(jnp.int32(0))
    pl.when(inside > 0)(lambda: fetch(jnp.int32(1)))
    meeting = None if plan.alone else pallas_gpu_squares.Meeting(*far, (head, tokens, block), far_scratch, register)
    plgpu.barrier_wait(own_ready)

    def compute(da_TxC):
        @pl.loop(0, inside + 1)
        def _(step):
            slot = lax.rem(step, 2)
            plgpu.barrier_wait(ready.at[slot])
            s_TxK = product(a_smem, b_smem.at[slot].transpose((1, 0)))
            dw_TxK = product(g_smem, v_smem.at[slot].transpose((1, 0))) + by_row(load_rows(e_smem), TILE)
            _, slope_TxK = power_and_slope(s_TxK if plan.scale == 1.0 else plan.scale * s_TxK, plan.degree)
            ds_TxK = masked(dw_TxK * slope_TxK, (inside - step) * TILE, keys=1)
            multiply(da_TxC, ds_TxK.astype(jnp.bfloat16), b_smem.at[slot], register)

            @pl.when(step + 2 <= inside)
            def _():
                plgpu.wgmma_wait(0)
                plgpu.commit_smem()
                fetch(step + 2)

        return da_TxC[...]

    da_TxC = plan.degree * plan.scale * pl.run_scoped(compute, plgpu.ACC(a_smem.shape, jnp.float32))
    if meeting is None:
        gradients = [da_TxC]
    else:
        meeting.wait()
        if plan.exact_local:
            staged[1][...] = da_TxC.astype(jnp.bfloat16)
        dx_TxR = meeting.times_moment() * by_row(load_rows(e_smem), meeting.features)
        dx_TxR = 2.0 * (dx_TxR + jnp.concatenate(meeting.squares(g=g_smem), axis=1))
        gradients = [dx_TxR if plan.exact_local else dx_TxR + da_TxC]
    _write(gradients, staged, results, head, tokens)


def _key_gradients(plan: Plan, b, a, v, g, e, *refs):
    *far, results, far_scratch, register, own, walked, staged = _grouped(plan, refs, 3 if plan.exact_local else 2)
    b_smem, v_smem, own_ready = own
    a_smem, g_smem, e_smem, ready = walked
    tile, head = lax.axis_index('tile'), lax.axis_index('head')
    inside, block = lax.rem(tile, plan.tiles), lax.div(tile, plan.tiles)
    tokens = pl.ds(tile * TILE, TILE)

    def fetch(step):
        queries = pl.ds(block * plan.block + step * TILE, TILE)
        slot = lax.rem(step, 2)
        plgpu.copy_gmem_to_smem(a.at[head, queries], a_smem.at[slot], ready.at[slot])
        plgpu.copy_gmem_to_smem(g.at[head, queries], g_smem.at[slot], ready.at[slot])
        plgpu.copy_gmem_to_smem(e.at[head, queries], e_smem.at[slot], ready.at[slot])

    plgpu.copy_gmem_to_smem(b.at[head, tokens], b_smem, own_ready)
    plgpu.copy_gmem_to_smem(v.at[head, tokens], v_smem, own_ready)
    fetch(inside)
    pl.when(inside + 1 < plan.tiles)(lambda: fetch(inside + 1))
    meeting = None if plan.alone else pallas_gpu_squares.Meeting(*far, (head, tokens, block), far_scratch, register)
    plgpu.barrier_wait(own_ready)

    def compute(db_TxC, dv_TxD):
        @pl.loop(inside, plan.tiles)
        def _(step):
            slot = lax.rem(step, 2)
            plgpu.barrier_wait(ready.at[slot])
            s_TxQ = product(b_smem, a_smem.at[slot].transpose((1, 0)))
            dw_TxQ = product(v_smem, g_smem.at[slot].transpose((1, 0))) + by_column(load_columns(e_smem.at[slot]), TILE)
            w_TxQ, slope_TxQ = power_and_slope(s_TxQ if plan.scale == 1.0 else plan.scale * s_TxQ, plan.degree)
            shift = (step - inside) * TILE
            w_TxQ, ds_TxQ = (masked(m, shift, keys=0).astype(jnp.bfloat16) for m in (w_TxQ, dw_TxQ * slope_TxQ))
            multiply(dv_TxD, w_TxQ, g_smem.at[slot], register)
            multiply(db_TxC, ds_TxQ, a_smem.at[slot], register)

            @pl.when(step + 2 < plan.tiles)
            def _():
                plgpu.wgmma_wait(0)
                plgpu.commit_smem()
                fetch(step + 2)

        db = plan.degree * plan.scale * db_TxC[...]
        if meeting is None:
            return dv_TxD[...], db
        meeting.wait()
        if plan.exact_local:
            staged[2][...] = db.astype(jnp.bfloat16)
        dy_TxR = 2.0 * (meeting.times_moment() + jnp.concatenate(meeting.squares(dv_TxD, v_smem), axis=1))
        return dv_TxD[...], dy_TxR if plan.exact_local else dy_TxR + db

    accumulators = (plgpu.ACC(a.shape, jnp.float32) for a in (b_smem, v_smem))
    _write(pl.run_scoped(compute, *accumulators), staged, results, head, tokens)


def _grouped(plan: Plan, refs, count: int):
    """The references of a kernel after the inputs that all have, with its `count` results as one."""
    inputs = 0 if plan.alone else 4
    return (*refs[:inputs], refs[inputs : inputs + count], *refs[inputs + count :])


def _write(gradients, staged, results, head, tokens) -> None:
    """Through shared memory; those after `gradients` are staged already."""
    for gradient, smem in zip(gradients, staged, strict=False):
        smem[...] = gradient.astype(jnp.bfloat16)
    plgpu.commit_smem()
    for smem, result in zip(staged, results, strict=True):
        plgpu.copy_smem_to_gmem(smem, result.at[head, tokens])
    plgpu.wait_smem_to_gmem(0)
