"""The forward kernel of a node of the sketch networks on Hopper GPUs.

N sketches, V vectors, T of them a tile, M input size, E hidden units, r outputs, S the networks' inputs: 1 where both
read the same, else 2. Arrays in memory are [N, vectors, columns].
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.formulas import EPSILON
from lm.ops.gpu import (
    FAST,
    accumulator,
    load_columns,
    load_matrix,
    matrix,
    multiply,
    product,
    repeat_per_column,
    repeat_per_row,
)
from lm.ops.sketch_networks.folding import LevelMaps, gelu
from lm.ops.sketch_networks.gpu.plan import TILE, GpuNodePlan
from lm.ops.sketch_networks.gpu.stream import Stream, StreamMemory, allocate
from lm.ops.sketch_networks.types import ByLevel

PASSES = ((0, 0), (0, 1), (1, 0), (1, 1))
"""(network, level) of each pass."""

Inputs = tuple[jax.Array, ...]
"""S arrays [N, V, M]."""


def forward(plan: GpuNodePlan, inputs: Inputs, maps: ByLevel[LevelMaps[jax.Array]], biases: jax.Array) -> jax.Array:
    """Returns ψ, bfloat16 [N, V, r].

    Args:
        plan: V is a multiple of its warpgroups times TILE.
        inputs: the children of the node.
        maps: in the dtype of the inputs.
        biases: float32 [N, 4, E / CHUNK, CHUNK], the lower level before the upper level.
    """
    (n, vectors, size), (_, _, hidden, r) = inputs[0].shape, maps.lower.narrow.shape
    count, warpgroups = len(inputs), plan.forward_warpgroups

    def sketch_networks_forward(*refs):
        _forward(plan, *refs)

    return plgpu.kernel(
        sketch_networks_forward,
        out_type=jax.ShapeDtypeStruct((n, vectors, r), inputs[0].dtype),
        grid=(vectors // (warpgroups * TILE), n),
        grid_names=('block', 'sketch'),
        num_threads=warpgroups,
        thread_name='warpgroup',
        compiler_params=FAST,
        scratch_types=[
            allocate(warpgroups, size, r, hidden),
            matrix(count, warpgroups, TILE, size),
            plgpu.Barrier(num_arrivals=count, num_barriers=warpgroups),
            matrix(warpgroups, TILE, r),
        ],
    )(inputs, maps, biases)


def _forward(
    plan: GpuNodePlan,
    inputs: tuple[jax.Ref, ...],
    maps: ByLevel[LevelMaps[jax.Ref]],
    biases: jax.Ref,
    psi: jax.Ref,
    memory: StreamMemory,
    x_smem: jax.Ref,
    x_ready: jax.Ref,
    y_smem: jax.Ref,
) -> None:
    block, sketch, warpgroup = (lax.axis_index(name) for name in ('block', 'sketch', 'warpgroup'))
    vectors = pl.ds((block * plan.forward_warpgroups + warpgroup) * TILE, TILE)
    for x, x_TxM in zip(inputs, tiles_of(x_smem, warpgroup), strict=True):
        plgpu.copy_gmem_to_smem(x.at[sketch, vectors], x_TxM, x_ready.at[warpgroup])
    sketch_maps = jax.tree.map(lambda m: m.at[sketch], maps)
    weights = Stream(PASSES, warpgroup, sketch_maps, biases.at[sketch], memory)
    y_TxR = y_smem.at[warpgroup]
    plgpu.barrier_wait(x_ready.at[warpgroup])
    xs = tiles_of(x_smem, warpgroup)
    for x_TxM in xs:
        standardize(load_matrix(x_TxM).astype(jnp.float32), x_TxM)
    results = []
    for network in range(2):
        standardize(compute_level(weights, xs[network % len(xs)]), y_TxR)
        results.append(compute_level(weights, y_TxR))
    r = y_TxR.shape[1]
    y_TxR[...] = (r**0.5 * jnp.tanh(r**-0.5 * results[0] * results[1])).astype(y_TxR.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(y_TxR, psi.at[sketch, vectors])
    plgpu.wait_smem_to_gmem(0)


def tiles_of(x_SxWxTxM: jax.Ref, warpgroup: jax.Array) -> list[Any]:
    """Returns the tiles of a warpgroup, one for each of S arrays."""
    return [x_SxWxTxM.at[i, warpgroup] for i in range(x_SxWxTxM.shape[0])]


def compute_level(weights: Stream, x_TxM) -> jax.Array:
    """Returns gelu(x W + c) V for the weights of the next pass, float32 [T, r]."""

    def compute(y_TxR):
        def chunk(w_CxM, v_CxR, c_C):
            z_TxC = product(x_TxM, w_CxM.transpose((1, 0))) + repeat_per_column(load_columns(c_C), TILE)
            multiply(y_TxR, gelu(z_TxC).astype(jnp.bfloat16), v_CxR, 'warpgroup')

        weights.next_pass(chunk)
        return y_TxR[...]

    return pl.run_scoped(compute, accumulator(TILE, weights.r))


def standardize(x_TxM: jax.Array, destination) -> jax.Array:
    """Writes x with mean 0 and variance 1 over the columns, and returns the factors of its deviations, float32 [T]."""
    size = x_TxM.shape[1]
    centred_TxM = x_TxM - repeat_per_row(jnp.sum(x_TxM, axis=1) / size, size)
    inverse_T = lax.rsqrt(jnp.sum(centred_TxM * centred_TxM, axis=1) / size + EPSILON)
    destination[...] = (centred_TxM * repeat_per_row(inverse_T, size)).astype(destination.dtype)
    plgpu.commit_smem()
    return inverse_T
