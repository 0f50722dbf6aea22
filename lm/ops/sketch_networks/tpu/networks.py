"""The learned sketch on TPUs: one fused Pallas kernel a node and direction, whose hidden layers never reach HBM.

Static cycles per token and head are measured by `scripts.kernels.cycles`.
"""

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from lm.ops import platform
from lm.ops.custom_vjp import custom_vjp
from lm.ops.formulas import climb_tree
from lm.ops.residuals import save_residual
from lm.ops.sketch_networks.folding import LevelMaps, fold
from lm.ops.sketch_networks.tpu.kernels import backward, forward
from lm.ops.sketch_networks.tpu.plan import NodePlan
from lm.ops.sketch_networks.tpu.tiles import OFFSET
from lm.ops.sketch_networks.types import ByLevel, Node, Nodes, SketchCall, Sketched, SketchSizes
from lm.ops.tpu import LANES, ROWS

BLOCK, TILE = 1024, 512
"""The most tokens per grid step, and of the part of it whose hidden layers exist at a time in the backward kernel: long
enough for the matrix units to have the products of one network while the other's hidden units are computed."""


def sketch_networks(call: SketchCall) -> Sketched:
    """Computes calls that `unsupported` does not refuse."""
    by_device = platform.per_device(_sketch, split=(False, True))
    return Sketched(*zip(*(by_device(call.nodes, x_BxLxNxGxM) for x_BxLxNxGxM in call.xs_BxLxNxGxM), strict=True))


def unsupported(call: SketchCall) -> str | None:
    """Returns why the kernels cannot compute this call, or None."""
    if platform.target_platform() != 'tpu':
        return 'needs a TPU'
    x, (_, _, hidden, r) = call.xs_BxLxNxGxM[0], call.sizes
    for name, size in (('vectors', x.shape[-1]), ('sketches', r)):
        if size % ROWS:
            return f'takes {name} whose size is a multiple of {ROWS}, not {size}'
    if x.shape[1] < LANES:
        return f'takes {LANES} tokens or more, not {x.shape[1]}'
    if reason := platform.mixed_types(*call.xs_BxLxNxGxM) or platform.uneven_batch(x.shape[0]):
        return reason
    if vmem_estimate(LANES, max(x.shape[-1], r), hidden, r, x.dtype.itemsize) > 0.8 * platform.vmem()[0]:
        return f'would not fit its VMEM with sketches of {r} and {hidden} hidden units'
    return None


def plan_for(length: int, heads: int, size: int, hidden: int, r: int, itemsize: int) -> NodePlan:
    """Returns how sequences of `length` vectors of `size` numbers are computed, `heads` heads per sketch."""
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
        block=block,
        tile=tile,
        forward_tile=forward_tile,
        heads=heads,
        parts=2 if steps % 2 == 0 else 1,
        rows=rows,
        narrow=wide and itemsize == 2,
        vmem_limit_bytes=limit,
    )


def vmem_estimate(tile: int, size: int, hidden: int, r: int, itemsize: int) -> int:
    """Returns the bytes of VMEM that the backward kernel, the larger one, takes: about what the compiler reports."""
    weights = 2 * hidden * (size + 3 * r)
    return (4 * itemsize + 8) * weights + 24 * itemsize * hidden * tile


def _sketch(nodes: Nodes, x_BxLxNxGxM: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the sketches of vectors, and the vectors."""
    batch, length, n, heads, size = x_BxLxNxGxM.shape
    sizes = SketchSizes.measure(nodes)
    plan = plan_for(length, heads, size, sizes.hidden, sizes.r, x_BxLxNxGxM.dtype.itemsize)
    # Zero tokens after the last: their sketches are cut off, and their gradients are 0.
    x_BxNxGxMxL = jnp.pad(x_BxLxNxGxM.transpose(0, 2, 3, 4, 1), ((0, 0),) * 4 + ((0, -length % plan.block),))
    leaf_BxHxMxL = passed_BxHxMxL = x_BxNxGxMxL.reshape(batch, n * heads, size, -1)

    def join(networks: Node, left: jax.Array, right: jax.Array) -> jax.Array:
        """Computes ψ of one node; both children of a lowest node are the vectors themselves."""
        nonlocal passed_BxHxMxL
        maps = _maps_with_biases(networks)
        if left is not right:
            psi, _ = node(plan, (left, right), maps)
            return psi
        # A node returns its inputs too. Each lowest node takes the vectors that the lowest node before it has returned.
        # On the way back each one therefore gets the gradient of the vectors from all nodes after it, and its kernel
        # adds its own. If all took the same array, XLA would add their gradients in passes of their own.
        psi, (passed_BxHxMxL,) = node(plan, (passed_BxHxMxL,), maps)
        return psi

    def by_token(a_BxHxFxL: jax.Array) -> jax.Array:
        a_BxNxGxFxL = a_BxHxFxL[..., :length].reshape(batch, n, heads, -1, length)
        return a_BxNxGxFxL.transpose(0, 4, 1, 2, 3)

    psi_BxHxRxL = climb_tree(nodes, [leaf_BxHxMxL] * (len(nodes) + 1), join)
    return by_token(psi_BxHxRxL), by_token(passed_BxHxMxL)


def _maps_with_biases(networks: Node) -> ByLevel[LevelMaps[jax.Array]]:
    """Returns the maps of both networks as the kernels take them, in float32 (see `fold`).

    The rows of a standardized input add up to 0, so that any number may be added to all columns of a map. Here it is
    the bias over `OFFSET`, which the kernels add to the input.
    """
    maps, biases = fold(networks)

    def shift(level: LevelMaps[jax.Array], bias_Nx2xE: jax.Array) -> LevelMaps[jax.Array]:
        wide = level.wide_Nx2xExM
        shifted = wide + (bias_Nx2xE[..., None] / OFFSET - wide.sum(-1, keepdims=True)) / wide.shape[-1]
        return LevelMaps(shifted, level.narrow)

    return ByLevel(shift(maps.lower, biases.lower), shift(maps.upper, biases.upper))


@custom_vjp(0)
def node(
    plan: NodePlan, inputs: tuple[jax.Array, ...], maps: ByLevel[LevelMaps[jax.Array]]
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Returns ψ [B, H, r, L] of one node, and its inputs for what else reads them.

    Args:
        plan: how it is computed.
        inputs: its children [B, H, M, L], one array where they are the same.
        maps: from `_maps_with_biases`.
    """
    return forward(plan, inputs, _rounded(maps, inputs[0].dtype)), inputs


def _node_forward(plan, inputs, maps):
    inputs, maps = jax.tree.map(lambda primal: primal.value, (inputs, maps))
    psi = save_residual(forward(plan, inputs, _rounded(maps, inputs[0].dtype)))
    return (psi, inputs), (inputs, maps)


def _node_backward(plan, residuals, cotangents):
    inputs, maps = residuals
    dpsi, others = cotangents
    if isinstance(dpsi, SymbolicZero):
        dpsi = jnp.zeros(dpsi.shape, inputs[0].dtype)
    others = tuple(None if isinstance(d, SymbolicZero) else d for d in others)
    dinputs, dmaps = backward(plan, inputs, _rounded(maps, inputs[0].dtype), dpsi, others)

    def turn_back(turned: LevelMaps[jax.Array]) -> LevelMaps[jax.Array]:
        return LevelMaps(turned.wide_Nx2xExM.swapaxes(2, 3), turned.narrow)

    summed = jax.tree.map(lambda g: g.sum(axis=1), dmaps)
    return dinputs, ByLevel(turn_back(summed.lower), turn_back(summed.upper))


node.defvjp(_node_forward, _node_backward, symbolic_zeros=True)


def _rounded(maps: ByLevel[LevelMaps[jax.Array]], dtype: DTypeLike) -> ByLevel[LevelMaps[jax.Array]]:
    return jax.tree.map(lambda w: w.astype(dtype), maps)
