"""The learned sketch on TPUs: one fused Pallas kernel a node and direction, whose hidden layers never reach HBM.

Static cycles per token and head are measured by `lm.bench.kernels`.
"""

import functools

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from lm.ops import platform
from lm.ops.residuals import saved
from lm.ops.sketch_networks.folding import fold
from lm.ops.sketch_networks.tpu.kernels import backward, forward
from lm.ops.sketch_networks.tpu.plan import NodePlan
from lm.ops.sketch_networks.tpu.tiles import OFFSET
from lm.ops.sketch_networks.types import NetworkWeights, Nodes, Sketched, climb
from lm.ops.tpu import LANES, ROWS

BLOCK, TILE = 1024, 512
"""Tokens of a grid step, and of the part of it whose hidden layers exist at a time in the backward kernel, at most:
long enough for the matrix units to have the products of one network while the other's hidden units are computed."""


def sketch_networks(nodes: Nodes, xs_BxLxNxGxM: tuple[jax.Array, ...]) -> Sketched:
    """Arguments as in `lm.ops.sketch_networks`; calls that `unsupported` refuses are wrong here."""
    by_device = platform.per_device(_sketch, split=(False, True))
    return Sketched(*zip(*(by_device(nodes, x_BxLxNxGxM) for x_BxLxNxGxM in xs_BxLxNxGxM), strict=True))


def unsupported(nodes: Nodes, xs: tuple[jax.Array, ...]) -> str | None:
    """Why the kernels cannot compute this call, or None."""
    if platform.target_platform() != 'tpu':
        return 'needs a TPU'
    x, r = xs[0], nodes[0][0].kernels[-1].shape[-1]
    for name, size in (('vectors', x.shape[-1]), ('sketches', r)):
        if size % ROWS:
            return f'takes {name} whose size is a multiple of {ROWS}, not {size}'
    if x.shape[1] < LANES:
        return f'takes {LANES} tokens or more, not {x.shape[1]}'
    dtypes = {x.dtype for x in xs}
    if len(dtypes) > 1 or not dtypes <= {jnp.dtype('bfloat16'), jnp.dtype('float32')}:
        return f'takes arrays that are all bfloat16 or all float32, not {", ".join(sorted(map(str, dtypes)))}'
    if reason := platform.uneven_batch(x.shape[0]):
        return reason
    hidden = nodes[0][0].kernels[0].shape[-1]
    if vmem_estimate(LANES, max(x.shape[-1], r), hidden, r, x.dtype.itemsize) > 0.8 * platform.vmem()[0]:
        return f'would not fit its VMEM with sketches of {r} and {hidden} hidden units'
    return None


def plan_for(length: int, heads: int, size: int, hidden: int, r: int, itemsize: int) -> NodePlan:
    """How sequences of `length` vectors of `size` numbers are computed, `heads` heads a sketch."""
    available, limit = platform.vmem()
    steps = -(-length // BLOCK)
    block = -(-length // (2 * steps * LANES)) * 2 * LANES
    sizes = [tile for tile in range(TILE, 0, -LANES) if block % (2 * tile) == 0]
    fitting = [tile for tile in sizes if vmem_estimate(tile, size, hidden, r, itemsize) <= 0.8 * available]
    tile = (fitting or sizes[-1:])[0]
    # The forward kernel gains from longer tiles, but for v4, which loads and stores less at a time.
    forward_tile = block if limit else sizes[0]
    # Matrix units of 256 want long products; they came with vector units that compute in bfloat16.
    wide = platform.matrix_side() > LANES
    rows = min(hidden, 256 if wide else 64)
    return NodePlan(
        block, tile, forward_tile, heads, 2 if steps % 2 == 0 else 1, rows, wide and itemsize == 2, limit
    )  # fmt: skip


def vmem_estimate(tile: int, size: int, hidden: int, r: int, itemsize: int) -> int:
    """Bytes of VMEM that the backward kernel, the larger one, takes: about what the compiler reports."""
    weights = 2 * hidden * (size + 3 * r)
    return (4 * itemsize + 8) * weights + 24 * itemsize * hidden * tile


def _sketch(nodes: Nodes, x_BxLxNxGxM: jax.Array) -> tuple[jax.Array, jax.Array]:
    batch, length, n, heads, size = x_BxLxNxGxM.shape
    r = nodes[0][0].kernels[-1].shape[-1]
    hidden = nodes[0][0].kernels[0].shape[-1]
    plan = plan_for(length, heads, size, hidden, r, x_BxLxNxGxM.dtype.itemsize)
    # Zero tokens after the last: their sketches are cut off, and their gradients are 0.
    x_BxNxGxMxL = jnp.pad(x_BxLxNxGxM.transpose(0, 2, 3, 4, 1), ((0, 0),) * 4 + ((0, -length % plan.block),))
    leaf_BxHxMxL = passed_BxHxMxL = x_BxNxGxMxL.reshape(batch, n * heads, size, -1)

    def join(first: NetworkWeights, second: NetworkWeights, left: jax.Array, right: jax.Array) -> jax.Array:
        nonlocal passed_BxHxMxL
        weights = _with_biases(first, second)
        if left is right:  # the vectors, from hand to hand, so that their gradients are added on the way back
            psi, (passed_BxHxMxL,) = node(plan, (passed_BxHxMxL,), weights)
        else:
            psi, _ = node(plan, (left, right), weights)
        return psi

    def as_given(a_BxHxFxL: jax.Array) -> jax.Array:
        a_BxNxGxFxL = a_BxHxFxL[..., :length].reshape(batch, n, heads, -1, length)
        return a_BxNxGxFxL.transpose(0, 4, 1, 2, 3)

    psi_BxHxRxL = climb(nodes, leaf_BxHxMxL, join)
    return as_given(psi_BxHxRxL), as_given(passed_BxHxMxL)


def _with_biases(first: NetworkWeights, second: NetworkWeights) -> tuple[jax.Array, ...]:
    """The four maps of both networks as the kernels want them, in float32 (see `fold`).

    What the sum over a standardized input's rows, 0, is multiplied by is free: here it is the bias over `OFFSET`.
    """
    w1, v1, w2, v2, c1, c2 = fold(first, second)

    def shifted(w_Nx2xExM, c_Nx2xE):
        return w_Nx2xExM + (c_Nx2xE[..., None] / OFFSET - w_Nx2xExM.sum(-1, keepdims=True)) / w_Nx2xExM.shape[-1]

    return shifted(w1, c1), v1, shifted(w2, c2), v2


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def node(
    plan: NodePlan, inputs: tuple[jax.Array, ...], weights: tuple[jax.Array, ...]
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """ψ [B, H, r, L] of one node, and its inputs for what else reads them.

    Args:
        plan: how it is computed.
        inputs: its children [B, H, M, L], one array where they are the same.
        weights: of `_with_biases`.
    """
    return forward(plan, inputs, _maps(weights, inputs[0].dtype)), inputs


def _node_forward(plan, inputs, weights):
    inputs, weights = jax.tree.map(lambda primal: primal.value, (inputs, weights))
    psi = saved(forward(plan, inputs, _maps(weights, inputs[0].dtype)))
    return (psi, inputs), (inputs, weights)


def _node_backward(plan, residuals, cotangents):
    inputs, weights = residuals
    dpsi, others = cotangents
    if isinstance(dpsi, SymbolicZero):
        dpsi = jnp.zeros(dpsi.shape, dpsi.dtype)
    count = len(inputs)
    others = [None if isinstance(d, SymbolicZero) else d for d in others]
    gradients = backward(plan, inputs, _maps(weights, inputs[0].dtype), dpsi, others)
    dw1, dv1, dw2, dv2 = (g.sum(axis=1) for g in gradients[count:])
    return tuple(gradients[:count]), (dw1.swapaxes(2, 3), dv1, dw2.swapaxes(2, 3), dv2)


node.defvjp(_node_forward, _node_backward, symbolic_zeros=True)


def _maps(weights: tuple[jax.Array, ...], dtype) -> list[jax.Array]:
    return [w.astype(dtype) for w in weights]
