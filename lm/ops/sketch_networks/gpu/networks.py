"""The learned sketch on Hopper GPUs: fused Mosaic GPU kernels of a node, whose hidden layers never reach memory."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from lm.ops import platform
from lm.ops.custom_vjp import custom_vjp
from lm.ops.formulas import climb_tree
from lm.ops.residuals import save_residual
from lm.ops.sketch_networks.folding import LevelMaps, fold
from lm.ops.sketch_networks.gpu.plan import CHUNK, TILE, GpuNodePlan, warpgroups
from lm.ops.sketch_networks.types import ByLevel, Node, Nodes, SketchCall, Sketched, SketchSizes

SIZES = (32, 64)
THREAD_BLOCKS = 256
"""Thread blocks of the kernel of the weights' gradients: two for each of 132 processors, nearly."""


def sketch_networks(call: SketchCall) -> Sketched:
    """Computes calls that `unsupported` does not refuse."""
    by_device = platform.per_device(_sketch, split=(False, True))
    sketches = tuple(by_device(call.nodes, x_BxLxNxGxM) for x_BxLxNxGxM in call.xs_BxLxNxGxM)
    return Sketched(sketches, call.xs_BxLxNxGxM)


def unsupported(call: SketchCall) -> str | None:
    """Returns why the kernels cannot compute this call, or None."""
    if reason := platform.without_mosaic_gpu():
        return reason
    (_, _, hidden, r), xs = call.sizes, call.xs_BxLxNxGxM
    for name, size in (('vectors', xs[0].shape[-1]), ('sketches', r)):
        if size not in SIZES:
            return f'takes {name} of {" or ".join(map(str, SIZES))} numbers, not {size}'
    if hidden % CHUNK:
        return f'takes hidden units in multiples of {CHUNK}, not {hidden}'
    if 0 in warpgroups(xs[0].shape[-1], r, hidden, len(call.nodes)):
        return f'would not fit its shared memory with {hidden} hidden units'
    if reason := platform.not_bfloat16(*xs):
        return reason
    return platform.uneven_batch(xs[0].shape[0])


def plan_for(vectors: int, nodes: Nodes) -> GpuNodePlan:
    """Returns how so many vectors are computed."""
    n, size, hidden, r = SketchSizes.measure(nodes)
    # The interpreter takes a thread of the processor for each; two meet all that four do.
    fitting = warpgroups(size, r, hidden, len(nodes)) if platform.target_platform() == 'gpu' else (2, 2)
    splits = max(1, THREAD_BLOCKS // (n * 2 * (hidden // CHUNK)))
    return GpuNodePlan(*fitting, split=-(-vectors // (TILE * splits)))


def _sketch(nodes: Nodes, x_BxLxNxGxM: jax.Array) -> jax.Array:
    batch, length, n, heads, size = x_BxLxNxGxM.shape
    vectors, r = batch * length * heads, SketchSizes.measure(nodes).r
    plan = plan_for(vectors, nodes)
    # Zeros after the last: their sketches are cut off, and their gradients are 0.
    padding = -vectors % plan.grain
    leaf_NxVxM = jnp.pad(x_BxLxNxGxM.transpose(2, 0, 1, 3, 4).reshape(n, vectors, size), ((0, 0), (0, padding), (0, 0)))

    def join(networks: Node, left: jax.Array, right: jax.Array) -> jax.Array:
        return node(plan, (left,) if left is right else (left, right), *_by_hidden_unit(networks))

    psi_NxVxR = climb_tree(nodes, [leaf_NxVxM] * (len(nodes) + 1), join)[:, :vectors]
    return psi_NxVxR.reshape(n, batch, length, heads, r).transpose(1, 2, 0, 3, 4)


def _by_hidden_unit(networks: Node) -> tuple[ByLevel[LevelMaps[jax.Array]], ByLevel[jax.Array]]:
    """Returns the folded maps and biases of a node as the kernels take them; biases are [N, 2, E / CHUNK, CHUNK]."""
    maps, biases = fold(networks)
    turned = (LevelMaps(level.wide_Nx2xExM, level.narrow.swapaxes(2, 3)) for level in maps)
    return ByLevel(*turned), ByLevel(*(c.reshape(*c.shape[:2], -1, CHUNK) for c in biases))


@custom_vjp(0)
def node(
    plan: GpuNodePlan,
    inputs: tuple[jax.Array, ...],
    maps: ByLevel[LevelMaps[jax.Array]],
    biases: ByLevel[jax.Array],
) -> jax.Array:
    """Returns ψ [N, V, r] of one node.

    Args:
        inputs: its children [N, V, M], one array where they are the same.
        maps: from `_by_hidden_unit`, like the biases; float32.
        biases: of the wide maps.
    """
    return _forward(plan, inputs, maps, biases)


def _node_forward(plan, inputs, maps, biases):
    return save_residual(_forward(plan, inputs, maps, biases)), (inputs, maps, biases)


# Compiled as one function, which all layers share: lowering the kernels takes seconds.
@functools.partial(jax.jit, static_argnums=0)
def _forward(plan: GpuNodePlan, inputs, maps, biases) -> jax.Array:
    # Mosaic GPU takes half a second to import, and only runs that use it shall wait for it.
    from lm.ops.sketch_networks.gpu.forward import forward

    return forward(plan, inputs, *_operands(maps, biases, inputs[0].dtype))


@functools.partial(jax.jit, static_argnums=0)
def _node_backward(plan, residuals, dpsi):
    from lm.ops.sketch_networks.gpu.backward import input_gradients, weight_gradients

    inputs, maps, biases = residuals
    rounded, joined = _operands(maps, biases, inputs[0].dtype)
    dinputs, standard, leaving = input_gradients(plan, inputs, rounded, joined, dpsi)
    dmaps, dbiases = [], []
    for entering, left, level, c, shapes in zip(standard, leaving, rounded, biases, maps, strict=True):
        wide, narrow, dc = (g.sum(axis=1) for g in weight_gradients(plan, entering, left, level, c))
        dmaps.append(LevelMaps(wide.reshape(shapes.wide_Nx2xExM.shape), narrow.reshape(shapes.narrow.shape)))
        dbiases.append(dc)
    return dinputs, ByLevel(*dmaps), ByLevel(*dbiases)


node.defvjp(_node_forward, _node_backward)


def _operands(maps, biases, dtype: DTypeLike) -> tuple[ByLevel[LevelMaps[jax.Array]], jax.Array]:
    """Returns the kernels' maps and biases."""
    return jax.tree.map(lambda w: w.astype(dtype), maps), jnp.concatenate(biases, axis=1)
