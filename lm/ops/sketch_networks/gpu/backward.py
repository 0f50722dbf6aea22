"""The backward kernels of a node of the sketch networks on Hopper GPUs. Letters as in the forward kernel, C a chunk.

The gradients of the inputs come first; that kernel computes the hidden layers of its tiles again, and leaves what the
gradients of the weights take: for each level the standardized vectors that enter it and gradients of what leaves it.
Thread blocks of the other kernel each hold a chunk of hidden units, and compute them again from those.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.gpu import by_column, by_row, load_columns, load_matrix, load_rows, matrix, multiply, walk, write, zeros
from lm.ops.sketch_networks.folding import gelu_and_slope
from lm.ops.sketch_networks.gpu import stream
from lm.ops.sketch_networks.gpu.forward import FAST, level, own, spare, standardize
from lm.ops.sketch_networks.gpu.forward import PASSES as FORWARD_PASSES
from lm.ops.sketch_networks.gpu.plan import CHUNK, TILE, GpuNodePlan

PASSES = (*FORWARD_PASSES, (0, 1), (1, 1), (0, 0), (1, 0))
"""(network, level): backward, both upper levels come first."""


def input_gradients(
    plan: GpuNodePlan,
    inputs: Sequence[jax.Array],
    maps: Sequence[jax.Array],
    biases: jax.Array,
    dpsi: jax.Array,
) -> list[jax.Array]:
    """S gradients of the inputs, and what `weight_gradients` takes.

    Args:
        plan: V is a multiple of its warpgroups times TILE.
        inputs: S arrays [N, V, M].
        maps: as in the forward pass.
        biases: as in the forward pass.
        dpsi: [N, V, r].

    Returns:
        S arrays like the inputs; then the standardized inputs of the lower levels [N, S, V, M] and of the upper ones
        [N, 2, V, r], the gradients of what leaves the lower levels [N, 2, V, r] and the upper ones [N, 2, V, r].
    """
    (n, vectors, size), r, dtype = inputs[0].shape, dpsi.shape[2], dpsi.dtype
    count, warpgroups = len(inputs), plan.backward_warpgroups

    def sketch_networks_input_gradients(*refs):
        _input_gradients(plan, count, *refs)

    between = jax.ShapeDtypeStruct((n, 2, vectors, r), dtype)
    return plgpu.kernel(
        sketch_networks_input_gradients,
        out_type=[
            *(jax.ShapeDtypeStruct(x.shape, dtype) for x in inputs),
            jax.ShapeDtypeStruct((n, count, vectors, size), dtype),
            *[between] * 3,
        ],
        grid=(vectors // (warpgroups * TILE), n),
        grid_names=('block', 'sketch'),
        num_threads=warpgroups,
        thread_name='warpgroup',
        compiler_params=FAST,
        scratch_types=[
            stream.scratch(warpgroups, size, r, maps[0].shape[2]),
            [matrix(count, warpgroups, TILE, size), matrix(2, warpgroups, TILE, r), matrix(2, warpgroups, TILE, r)],
            plgpu.Barrier(num_arrivals=count + 1, num_barriers=warpgroups),
            spare(plan, warpgroups),
        ],
    )(*inputs, *maps, biases, dpsi)


def _input_gradients(plan: GpuNodePlan, count: int, *refs):
    inputs, maps, (biases, dpsi, *refs) = refs[:count], refs[count : count + 4], refs[count + 4 :]
    dxs, (xs_out, ys_out, dys_out, dfs_out, streamed, tiles, ready, spares) = refs[:count], refs[count:]
    block, sketch, warpgroup = (lax.axis_index(name) for name in ('block', 'sketch', 'warpgroup'))
    vectors = pl.ds((block * plan.backward_warpgroups + warpgroup) * TILE, TILE)
    xs, ys, ds = (own(tile, warpgroup) for tile in tiles)
    for source, tile in zip((*inputs, dpsi), (*xs, ds[0]), strict=True):
        plgpu.copy_gmem_to_smem(source.at[sketch, vectors], tile, ready.at[warpgroup])
    weights = stream.Stream(PASSES, warpgroup, [m.at[sketch] for m in maps], biases.at[sketch], streamed)
    spares, r = [s.at[warpgroup] for s in spares], dpsi.shape[2]
    plgpu.barrier_wait(ready.at[warpgroup])

    x_inverses, y_inverses, results = [], [], []
    for i, x_TxM in enumerate(xs):
        x_inverses.append(standardize(load_matrix(x_TxM).astype(jnp.float32), x_TxM))
        plgpu.copy_smem_to_gmem(x_TxM, xs_out.at[sketch, i, vectors])
    for i, y_TxR in enumerate(ys):
        y_inverses.append(standardize(level(weights, xs[i % count], spares), y_TxR))
        plgpu.copy_smem_to_gmem(y_TxR, ys_out.at[sketch, i, vectors])
        results.append(level(weights, y_TxR, spares))

    bounded_TxR = jnp.tanh(r**-0.5 * results[0] * results[1])
    dproduct_TxR = load_matrix(ds[0]).astype(jnp.float32) * (1.0 - bounded_TxR * bounded_TxR)
    for d_TxR, other_TxR in zip(ds, (results[1], results[0]), strict=True):
        d_TxR[...] = (dproduct_TxR * other_TxR).astype(d_TxR.dtype)
    plgpu.commit_smem()
    for i, d_TxR in enumerate(ds):
        plgpu.copy_smem_to_gmem(d_TxR, dfs_out.at[sketch, i, vectors])
    for i, (y_TxR, d_TxR) in enumerate(zip(ys, ds, strict=True)):
        dy_TxR = _level_backward(weights, [(y_TxR, d_TxR)], spares)
        plgpu.wait_smem_to_gmem(0)
        _standardize_backward(y_TxR, y_inverses[i], dy_TxR, d_TxR)
        plgpu.copy_smem_to_gmem(d_TxR, dys_out.at[sketch, i, vectors])

    entering = [[(xs[0], d_TxR) for d_TxR in ds]] if count == 1 else [[pair] for pair in zip(xs, ds, strict=True)]
    for i, pairs in enumerate(entering):
        dx_TxM = _level_backward(weights, pairs, spares)
        plgpu.wait_smem_to_gmem(0)
        _standardize_backward(xs[i], x_inverses[i], dx_TxM, xs[i])
        plgpu.copy_smem_to_gmem(xs[i], dxs[i].at[sketch, vectors])
    plgpu.wait_smem_to_gmem(0)


def _level_backward(weights: stream.Stream, pairs, spares) -> jax.Array:
    """The gradient of the standardized vectors x that enter levels, float32 [T, M]: summed over passes, one a pair of
    x and the gradient of what leaves the level."""

    def compute(dx_TxM):
        for x_TxM, d_TxR in pairs:

            def chunk(w_CxM, v_CxR, c_C, x_TxM=x_TxM, d_TxR=d_TxR):
                z_TxC, dh_TxC = _two_products(x_TxM, w_CxM.transpose((1, 0)), d_TxR, v_CxR.transpose((1, 0)))
                _, slope_TxC = gelu_and_slope(z_TxC + by_column(load_columns(c_C), TILE))
                multiply(dx_TxM, (dh_TxC * slope_TxC).astype(jnp.bfloat16), w_CxM, spares)

            weights.next_pass(chunk)
        return dx_TxM[...]

    return pl.run_scoped(compute, plgpu.ACC(pairs[0][0].shape, jnp.float32))


def _two_products(a, b, c, d) -> tuple[jax.Array, jax.Array]:
    """a · b and c · d, as `product`."""

    def compute(first, second):
        plgpu.wgmma(first, a, b)
        plgpu.wgmma(second, c, d)
        return first[...], second[...]

    shapes = (a.shape[0], b.shape[1]), (c.shape[0], d.shape[1])
    return pl.run_scoped(compute, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))


def _standardize_backward(standard, inverse_T: jax.Array, d_TxM: jax.Array, destination) -> None:
    """Writes the gradient of what was standardized."""
    standard_TxM, size = load_matrix(standard).astype(jnp.float32), d_TxM.shape[1]
    d_TxM = d_TxM - by_row(jnp.sum(d_TxM, axis=1) / size, size)
    along_T = jnp.sum(d_TxM * standard_TxM, axis=1) / size
    d_TxM = by_row(inverse_T, size) * (d_TxM - standard_TxM * by_row(along_T, size))
    destination[...] = d_TxM.astype(destination.dtype)
    plgpu.commit_smem()


def weight_gradients(plan: GpuNodePlan, x, d, w, v, biases) -> list[jax.Array]:
    """The gradients of w, v and the biases of one level of both networks, in float32, for each plan.split tiles.

    Args:
        plan: V is a multiple of TILE.
        x: standardized vectors that enter the level, [N, S, V, M].
        d: gradients of what leaves it, [N, 2, V, r].
        w: [N, 2, E, M].
        v: [N, 2, E, r].
        biases: float32 [N, 2, E / C, C].

    Returns:
        [N, splits, 2, E / C, C, M], [N, splits, 2, E / C, C, r], [N, splits, 2, E / C, C].
    """
    (n, count, vectors, size), r, chunks = x.shape, d.shape[3], biases.shape[2]
    tiles = vectors // TILE
    splits = -(-tiles // plan.split)

    def sketch_networks_weight_gradients(x, d, w, v, biases, dw, dv, dc, spares, w_CxM, v_CxR, c_C, ready):
        part, chunk, sketch = (lax.axis_index(name) for name in ('part', 'chunk', 'sketch'))
        network, split = lax.rem(part, 2), lax.div(part, 2)
        hidden = pl.ds(chunk * CHUNK, CHUNK)
        plgpu.copy_gmem_to_smem(w.at[sketch, network, hidden], w_CxM, ready)
        plgpu.copy_gmem_to_smem(v.at[sketch, network, hidden], v_CxR, ready)
        plgpu.copy_gmem_to_smem(biases.at[sketch, network, chunk], c_C, ready)
        plgpu.barrier_wait(ready)

        def compute(dw_CxM, dv_CxR):
            def use(step, tiles, dc_C):
                x_TxM, d_TxR = tiles
                z_CxT, dh_CxT = _two_products(w_CxM, x_TxM.transpose((1, 0)), v_CxR, d_TxR.transpose((1, 0)))
                h_CxT, slope_CxT = gelu_and_slope(z_CxT + by_row(load_rows(c_C), TILE))
                multiply(dv_CxR, h_CxT.astype(jnp.bfloat16), d_TxR, spares)
                dz_CxT = dh_CxT * slope_CxT
                multiply(dw_CxM, dz_CxT.astype(jnp.bfloat16), x_TxM, spares)
                return dc_C + jnp.sum(dz_CxT, axis=1)

            sources = x.at[sketch, network if count == 2 else 0], d.at[sketch, network]
            last = jnp.minimum((split + 1) * plan.split, tiles)
            dc_C = walk(sources, 0, split * plan.split, last, use, zeros(CHUNK))
            return dw_CxM[...], dv_CxR[...], dc_C

        accumulators = [plgpu.ACC((CHUNK, columns), jnp.float32) for columns in (size, r)]
        dw_CxM, dv_CxR, dc_C = pl.run_scoped(compute, *accumulators)
        dw[sketch, split, network, chunk] = dw_CxM
        dv[sketch, split, network, chunk] = dv_CxR
        write(dc_C, dc.at[sketch, split, network, chunk], plgpu.SMEM((CHUNK,), jnp.float32))

    shape = (n, splits, 2, chunks, CHUNK)
    return plgpu.kernel(
        sketch_networks_weight_gradients,
        out_type=[jax.ShapeDtypeStruct(s, jnp.float32) for s in ((*shape, size), (*shape, r), shape)],
        grid=(2 * splits, chunks, n),
        grid_names=('part', 'chunk', 'sketch'),
        compiler_params=FAST,
        scratch_types=[
            [matrix(CHUNK, TILE)] if plan.interpreted else [],
            matrix(CHUNK, size),
            matrix(CHUNK, r),
            plgpu.SMEM((CHUNK,), jnp.float32),
            plgpu.Barrier(num_arrivals=3),
        ],
    )(x, d, w, v, biases)
