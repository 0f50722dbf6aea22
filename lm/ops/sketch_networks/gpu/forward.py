"""The forward kernel of a node of the sketch networks on Hopper GPUs.

N sketches, V vectors, T of them a tile, M input size, E hidden units, r outputs, S the networks' inputs: 1 where both
read the same, else 2. Arrays in memory are [N, vectors, columns].
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.gpu import by_column, by_row, load_columns, load_matrix, matrix, multiply, product
from lm.ops.sketch_networks.folding import gelu
from lm.ops.sketch_networks.gpu import stream
from lm.ops.sketch_networks.gpu.plan import CHUNK, TILE, GpuNodePlan
from lm.ops.sketch_networks.types import EPSILON

FAST = plgpu.CompilerParams(approx_math=True)
"""tanh is an instruction, whose error of 2⁻¹¹ rounding to bfloat16 exceeds."""

PASSES = ((0, 0), (0, 1), (1, 0), (1, 1))
"""(network, level)."""


def forward(plan: GpuNodePlan, inputs: Sequence[jax.Array], maps: Sequence[jax.Array], biases: jax.Array) -> jax.Array:
    """ψ, bfloat16 [N, V, r].

    Args:
        plan: V is a multiple of its warpgroups times TILE.
        inputs: S arrays [N, V, M].
        maps: [N, 2, E, M], [N, 2, E, r], [N, 2, E, r], [N, 2, E, r].
        biases: float32 [N, 4, E / CHUNK, CHUNK].
    """
    (n, vectors, size), (_, _, hidden, r) = inputs[0].shape, maps[1].shape
    count, warpgroups = len(inputs), plan.forward_warpgroups

    def sketch_networks_forward(*refs):
        _forward(plan, count, *refs)

    return plgpu.kernel(
        sketch_networks_forward,
        out_type=jax.ShapeDtypeStruct((n, vectors, r), inputs[0].dtype),
        grid=(vectors // (warpgroups * TILE), n),
        grid_names=('block', 'sketch'),
        num_threads=warpgroups,
        thread_name='warpgroup',
        compiler_params=FAST,
        scratch_types=[
            stream.scratch(warpgroups, size, r, hidden),
            [matrix(count, warpgroups, TILE, size), plgpu.Barrier(num_arrivals=count, num_barriers=warpgroups)],
            matrix(warpgroups, TILE, r),
            spare(plan, warpgroups),
        ],
    )(*inputs, *maps, biases)


def spare(plan: GpuNodePlan, warpgroups: int) -> list:
    """Scratch of `multiply`."""
    return [matrix(warpgroups, TILE, CHUNK)] if plan.interpreted else []


def _forward(plan: GpuNodePlan, count: int, *refs):
    inputs, maps, (biases, psi, *refs) = refs[:count], refs[count : count + 4], refs[count + 4 :]
    streamed, (x_smem, x_ready), y_smem, spares = refs
    block, sketch, warpgroup = (lax.axis_index(name) for name in ('block', 'sketch', 'warpgroup'))
    vectors = pl.ds((block * plan.forward_warpgroups + warpgroup) * TILE, TILE)
    for x, x_TxM in zip(inputs, own(x_smem, warpgroup), strict=True):
        plgpu.copy_gmem_to_smem(x.at[sketch, vectors], x_TxM, x_ready.at[warpgroup])
    weights = stream.Stream(PASSES, warpgroup, [m.at[sketch] for m in maps], biases.at[sketch], streamed)
    spares, y_TxR = [s.at[warpgroup] for s in spares], y_smem.at[warpgroup]
    plgpu.barrier_wait(x_ready.at[warpgroup])
    xs = own(x_smem, warpgroup)
    for x_TxM in xs:
        standardize(load_matrix(x_TxM).astype(jnp.float32), x_TxM)
    results = []
    for network in range(2):
        standardize(level(weights, xs[network % count], spares), y_TxR)
        results.append(level(weights, y_TxR, spares))
    r = y_TxR.shape[1]
    y_TxR[...] = (r**0.5 * jnp.tanh(r**-0.5 * results[0] * results[1])).astype(y_TxR.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(y_TxR, psi.at[sketch, vectors])
    plgpu.wait_smem_to_gmem(0)


def own(x_SxWxTxM, warpgroup) -> list:
    return [x_SxWxTxM.at[i, warpgroup] for i in range(x_SxWxTxM.shape[0])]


def level(weights: stream.Stream, x_TxM, spares) -> jax.Array:
    """gelu(x W + c) V for the weights of the next pass, float32 [T, r]."""

    def compute(y_TxR):
        def chunk(w_CxM, v_CxR, c_C):
            z_TxC = product(x_TxM, w_CxM.transpose((1, 0))) + by_column(load_columns(c_C), TILE)
            multiply(y_TxR, gelu(z_TxC).astype(jnp.bfloat16), v_CxR, spares)

        weights.next_pass(chunk)
        return y_TxR[...]

    return pl.run_scoped(compute, plgpu.ACC((TILE, weights.maps[1].shape[2]), jnp.float32))


def standardize(x_TxM: jax.Array, destination) -> jax.Array:
    """Writes x with mean 0 and variance 1 over the columns; what its deviations were multiplied by, float32 [T]."""
    size = x_TxM.shape[1]
    centred_TxM = x_TxM - by_row(jnp.sum(x_TxM, axis=1) / size, size)
    inverse_T = lax.rsqrt(jnp.sum(centred_TxM * centred_TxM, axis=1) / size + EPSILON)
    destination[...] = (centred_TxM * by_row(inverse_T, size)).astype(destination.dtype)
    plgpu.commit_smem()
    return inverse_T
