"""The backward kernels of a node of the sketch networks on Hopper GPUs. Letters as in the forward kernel, C a chunk.

The gradients of the inputs come first; that kernel computes the hidden layers of its tiles again, and leaves what the
gradients of the weights take: for each level the standardized vectors that enter it and gradients of what leaves it.
Thread blocks of the other kernel each hold a chunk of hidden units, and compute them again from those.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.gpu import (
    FAST,
    accumulator,
    load_columns,
    load_matrix,
    load_rows,
    matrix,
    multiply,
    repeat_per_column,
    repeat_per_row,
    sum_products,
    walk,
    write,
    zeros,
)
from lm.ops.sketch_networks.folding import LevelMaps, gelu_and_slope
from lm.ops.sketch_networks.gpu.forward import PASSES as FORWARD_PASSES
from lm.ops.sketch_networks.gpu.forward import (
    Inputs,
    compute_level,
    standardize,
    tiles_of,
)
from lm.ops.sketch_networks.gpu.plan import CHUNK, TILE, GpuNodePlan
from lm.ops.sketch_networks.gpu.stream import Stream, StreamMemory, allocate
from lm.ops.sketch_networks.types import ByLevel

PASSES = (*FORWARD_PASSES, (0, 1), (1, 1), (0, 0), (1, 0))
"""Backward, both upper levels come first."""


def input_gradients(
    plan: GpuNodePlan, inputs: Inputs, maps: ByLevel[LevelMaps[jax.Array]], biases: jax.Array, dpsi: jax.Array
) -> tuple[Inputs, ByLevel[jax.Array], ByLevel[jax.Array]]:
    """Returns the gradients of the inputs, and what `weight_gradients` takes of each level.

    It takes the standardized vectors that enter a level, [N, S, V, M] and [N, 2, V, r]. It also takes the gradients of
    what leaves the level, [N, 2, V, r] each. Other arguments are as in the forward pass.

    Args:
        plan: V is a multiple of its warpgroups times TILE.
        dpsi: [N, V, r].
    """
    (n, vectors, size), r, dtype = inputs[0].shape, dpsi.shape[2], dpsi.dtype
    count, warpgroups = len(inputs), plan.backward_warpgroups
    between = jax.ShapeDtypeStruct((n, 2, vectors, r), dtype)
    results = (
        tuple(jax.ShapeDtypeStruct(x.shape, dtype) for x in inputs),
        ByLevel(jax.ShapeDtypeStruct((n, count, vectors, size), dtype), between),
        ByLevel(between, between),
    )

    def sketch_networks_input_gradients(*refs):
        _input_gradients(plan, *refs)

    (gradients,) = plgpu.kernel(
        sketch_networks_input_gradients,
        out_type=(results,),
        grid=(vectors // (warpgroups * TILE), n),
        grid_names=('block', 'sketch'),
        num_threads=warpgroups,
        thread_name='warpgroup',
        compiler_params=FAST,
        scratch_types=[
            allocate(warpgroups, size, r, maps.lower.wide_Nx2xExM.shape[2]),
            [matrix(count, warpgroups, TILE, size), matrix(2, warpgroups, TILE, r), matrix(2, warpgroups, TILE, r)],
            plgpu.Barrier(num_arrivals=count + 1, num_barriers=warpgroups),
        ],
    )(inputs, maps, biases, dpsi)
    return gradients


def _input_gradients(
    plan: GpuNodePlan,
    inputs: tuple[jax.Ref, ...],
    maps: ByLevel[LevelMaps[jax.Ref]],
    biases: jax.Ref,
    dpsi: jax.Ref,
    results: tuple[tuple[jax.Ref, ...], ByLevel[jax.Ref], ByLevel[jax.Ref]],
    memory: StreamMemory,
    tiles: list[jax.Ref],
    ready: jax.Ref,
) -> None:
    dinputs, standard, leaving = results
    block, sketch, warpgroup = (lax.axis_index(name) for name in ('block', 'sketch', 'warpgroup'))
    vectors = pl.ds((block * plan.backward_warpgroups + warpgroup) * TILE, TILE)
    xs, ys, ds = (tiles_of(tile, warpgroup) for tile in tiles)  # of inputs, between the levels, and of gradients
    for source, tile in zip((*inputs, dpsi), (*xs, ds[0]), strict=True):
        plgpu.copy_gmem_to_smem(source.at[sketch, vectors], tile, ready.at[warpgroup])
    sketch_maps = jax.tree.map(lambda m: m.at[sketch], maps)
    weights = Stream(PASSES, warpgroup, sketch_maps, biases.at[sketch], memory)
    r = dpsi.shape[2]
    plgpu.barrier_wait(ready.at[warpgroup])

    # The forward pass again.
    x_inverses, y_inverses, outputs = [], [], []
    for i, x_TxM in enumerate(xs):
        x_inverses.append(standardize(load_matrix(x_TxM).astype(jnp.float32), x_TxM))
        plgpu.copy_smem_to_gmem(x_TxM, standard.lower.at[sketch, i, vectors])
    for i, y_TxR in enumerate(ys):
        y_inverses.append(standardize(compute_level(weights, xs[i % len(xs)]), y_TxR))
        plgpu.copy_smem_to_gmem(y_TxR, standard.upper.at[sketch, i, vectors])
        outputs.append(compute_level(weights, y_TxR))

    # Through the product of the two networks.
    bounded_TxR = jnp.tanh(r**-0.5 * outputs[0] * outputs[1])
    dproduct_TxR = load_matrix(ds[0]).astype(jnp.float32) * (1.0 - bounded_TxR * bounded_TxR)
    for d_TxR, other_TxR in zip(ds, (outputs[1], outputs[0]), strict=True):
        d_TxR[...] = (dproduct_TxR * other_TxR).astype(d_TxR.dtype)
    plgpu.commit_smem()
    for i, d_TxR in enumerate(ds):
        plgpu.copy_smem_to_gmem(d_TxR, leaving.upper.at[sketch, i, vectors])

    # Through the upper level of each network.
    for i, (y_TxR, d_TxR) in enumerate(zip(ys, ds, strict=True)):
        dy_TxR = _level_backward(weights, [(y_TxR, d_TxR)])
        plgpu.wait_smem_to_gmem(0)
        _standardize_backward(y_TxR, y_inverses[i], dy_TxR, d_TxR)
        plgpu.copy_smem_to_gmem(d_TxR, leaving.lower.at[sketch, i, vectors])

    # Through the lower level: an input that both networks read has the sum of two gradients.
    entering = [[(xs[0], d_TxR) for d_TxR in ds]] if len(xs) == 1 else [[pair] for pair in zip(xs, ds, strict=True)]
    for i, pairs in enumerate(entering):
        dx_TxM = _level_backward(weights, pairs)
        plgpu.wait_smem_to_gmem(0)
        _standardize_backward(xs[i], x_inverses[i], dx_TxM, xs[i])
        plgpu.copy_smem_to_gmem(xs[i], dinputs[i].at[sketch, vectors])
    plgpu.wait_smem_to_gmem(0)


def _level_backward(weights: Stream, pairs: list[tuple]) -> jax.Array:
    """Returns the gradient of the standardized vectors x that enter levels, float32 [T, M].

    `pairs` are (x, gradient of what leaves the level); it sums over them, one pass each.
    """

    def compute(dx_TxM):
        for x_TxM, d_TxR in pairs:

            def chunk(w_CxM, v_CxR, c_C, x_TxM=x_TxM, d_TxR=d_TxR):
                z_TxC, dh_TxC = sum_products([(x_TxM, w_CxM.transpose((1, 0)))], [(d_TxR, v_CxR.transpose((1, 0)))])
                _, slope_TxC = gelu_and_slope(z_TxC + repeat_per_column(load_columns(c_C), TILE))
                multiply(dx_TxM, (dh_TxC * slope_TxC).astype(jnp.bfloat16), w_CxM, 'warpgroup')

            weights.next_pass(chunk)
        return dx_TxM[...]

    return pl.run_scoped(compute, accumulator(*pairs[0][0].shape))


def _standardize_backward(standard, inverse_T: jax.Array, d_TxM: jax.Array, destination) -> None:
    """Writes the gradient of the vectors that were standardized."""
    standard_TxM, size = load_matrix(standard).astype(jnp.float32), d_TxM.shape[1]
    d_TxM = d_TxM - repeat_per_row(jnp.sum(d_TxM, axis=1) / size, size)
    along_T = jnp.sum(d_TxM * standard_TxM, axis=1) / size
    d_TxM = repeat_per_row(inverse_T, size) * (d_TxM - standard_TxM * repeat_per_row(along_T, size))
    destination[...] = d_TxM.astype(destination.dtype)
    plgpu.commit_smem()


def weight_gradients(
    plan: GpuNodePlan, standard: jax.Array, leaving: jax.Array, maps: LevelMaps[jax.Array], biases: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradients of the maps and the biases of one level, in float32, for each plan.split tiles.

    They are [N, P, 2, K, C, M], [N, P, 2, K, C, r] and [N, P, 2, K, C]: P splits, K = E / C chunks.

    Args:
        plan: V is a multiple of TILE.
        standard: standardized vectors that enter the level, [N, M's networks, V, M].
        leaving: gradients of what leaves it, [N, 2, V, r].
        maps: of the level.
        biases: float32 [N, 2, E / C, C].
    """
    (n, count, vectors, size), r, chunks = standard.shape, leaving.shape[3], biases.shape[2]
    tiles = vectors // TILE
    splits = -(-tiles // plan.split)

    def sketch_networks_weight_gradients(x, d, w, v, biases, dw, dv, dc, w_CxM, v_CxR, c_C, ready):
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
                z_CxT, dh_CxT = sum_products([(w_CxM, x_TxM.transpose((1, 0)))], [(v_CxR, d_TxR.transpose((1, 0)))])
                h_CxT, slope_CxT = gelu_and_slope(z_CxT + repeat_per_row(load_rows(c_C), TILE))
                multiply(dv_CxR, h_CxT.astype(jnp.bfloat16), d_TxR)
                dz_CxT = dh_CxT * slope_CxT
                multiply(dw_CxM, dz_CxT.astype(jnp.bfloat16), x_TxM)
                return dc_C + jnp.sum(dz_CxT, axis=1)

            sources = x.at[sketch, network if count == 2 else 0], d.at[sketch, network]
            last = jnp.minimum((split + 1) * plan.split, tiles)
            dc_C = walk(sources, 0, split * plan.split, last, use, zeros(CHUNK))
            return dw_CxM[...], dv_CxR[...], dc_C

        dw_CxM, dv_CxR, dc_C = pl.run_scoped(compute, accumulator(CHUNK, size), accumulator(CHUNK, r))
        dw[sketch, split, network, chunk] = dw_CxM
        dv[sketch, split, network, chunk] = dv_CxR
        write(dc_C, dc.at[sketch, split, network, chunk], plgpu.SMEM((CHUNK,), jnp.float32))

    shape = (n, splits, 2, chunks, CHUNK)
    dw, dv, dc = plgpu.kernel(
        sketch_networks_weight_gradients,
        out_type=[jax.ShapeDtypeStruct(s, jnp.float32) for s in ((*shape, size), (*shape, r), shape)],
        grid=(2 * splits, chunks, n),
        grid_names=('part', 'chunk', 'sketch'),
        compiler_params=FAST,
        scratch_types=[
            matrix(CHUNK, size),
            matrix(CHUNK, r),
            plgpu.SMEM((CHUNK,), jnp.float32),
            plgpu.Barrier(num_arrivals=3),
        ],
    )(standard, leaving, *maps, biases)
    return dw, dv, dc
