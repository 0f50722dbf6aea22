"""The learned sketch on Hopper GPUs: fused Mosaic GPU kernels of a node, whose hidden layers never reach memory."""

import functools

import jax
import jax.numpy as jnp

from lm.ops import platform
from lm.ops.residuals import saved
from lm.ops.sketch_networks.folding import fold
from lm.ops.sketch_networks.gpu.plan import CHUNK, TILE, GpuNodePlan, warpgroups
from lm.ops.sketch_networks.types import NetworkWeights, Nodes, Sketched, climb

SIZES = (32, 64)
THREAD_BLOCKS = 256
"""Of the kernel of the weights' gradients: two for each of 132 processors, nearly."""


def sketch_networks(nodes: Nodes, xs_BxLxNxGxM: tuple[jax.Array, ...]) -> Sketched:
    """Arguments as in `lm.ops.sketch_networks`; calls that `unsupported` refuses are wrong here."""
    by_device = platform.per_device(_sketch, split=(False, True))
    return Sketched(tuple(by_device(nodes, x_BxLxNxGxM) for x_BxLxNxGxM in xs_BxLxNxGxM), xs_BxLxNxGxM)


def unsupported(nodes: Nodes, xs: tuple[jax.Array, ...]) -> str | None:
    """Why the kernels cannot compute this call, or None."""
    if reason := platform.without_mosaic_gpu():
        return reason
    hidden, r = nodes[0][0].kernels[1].shape[1:]
    for name, size in (('vectors', xs[0].shape[-1]), ('sketches', r)):
        if size not in SIZES:
            return f'takes {name} of {" or ".join(map(str, SIZES))} numbers, not {size}'
    if hidden % CHUNK:
        return f'takes hidden units in multiples of {CHUNK}, not {hidden}'
    if 0 in warpgroups(xs[0].shape[-1], r, hidden, len(nodes)):
        return f'would not fit its shared memory with {hidden} hidden units'
    if dtypes := {x.dtype for x in xs} - {jnp.dtype('bfloat16')}:
        return f'takes arrays that are all bfloat16, not {", ".join(sorted(map(str, dtypes)))}'
    return platform.uneven_batch(xs[0].shape[0])


def plan_for(vectors: int, nodes: Nodes) -> GpuNodePlan:
    """How so many vectors are computed."""
    n, size, hidden = nodes[0][0].kernels[0].shape
    r = nodes[0][0].kernels[1].shape[-1]
    interpreted = platform.target_platform() != 'gpu'
    # The interpreter takes a thread of the processor for each; two meet all that four do.
    forward, backward = (2, 2) if interpreted else warpgroups(size, r, hidden, len(nodes))
    splits = max(1, THREAD_BLOCKS // (n * 2 * (hidden // CHUNK)))
    return GpuNodePlan(forward, backward, -(-vectors // (TILE * splits)), interpreted)


def _sketch(nodes: Nodes, x_BxLxNxGxM: jax.Array) -> jax.Array:
    batch, length, n, heads, size = x_BxLxNxGxM.shape
    vectors, r = batch * length * heads, nodes[0][0].kernels[-1].shape[-1]
    plan = plan_for(vectors, nodes)
    # Zeros after the last: their sketches are cut off, and their gradients are 0.
    padding = -vectors % plan.grain
    leaf_NxVxM = jnp.pad(x_BxLxNxGxM.transpose(2, 0, 1, 3, 4).reshape(n, vectors, size), ((0, 0), (0, padding), (0, 0)))

    def join(first: NetworkWeights, second: NetworkWeights, left: jax.Array, right: jax.Array) -> jax.Array:
        return node(plan, (left,) if left is right else (left, right), _by_hidden_unit(*fold(first, second)))

    psi_NxVxR = climb(nodes, leaf_NxVxM, join)[:, :vectors]
    return psi_NxVxR.reshape(n, batch, length, heads, r).transpose(1, 2, 0, 3, 4)


def _by_hidden_unit(w1, v1, w2, v2, c1, c2) -> tuple[jax.Array, ...]:
    """Of `fold`: [N, 2, E, M], [N, 2, E, r], [N, 2, E, r], [N, 2, E, r], [N, 2, E / CHUNK, CHUNK] twice."""
    c1, c2 = (c.reshape(*c.shape[:2], -1, CHUNK) for c in (c1, c2))
    return w1, v1.swapaxes(2, 3), w2, v2.swapaxes(2, 3), c1, c2


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def node(plan: GpuNodePlan, inputs: tuple[jax.Array, ...], weights: tuple[jax.Array, ...]) -> jax.Array:
    """ψ [N, V, r] of one node.

    Args:
        plan: how it is computed.
        inputs: its children [N, V, M], one array where they are the same.
        weights: of `_by_hidden_unit`, float32.
    """
    return _forward(plan, inputs, weights)


def _node_forward(plan, inputs, weights):
    return saved(_forward(plan, inputs, weights)), (inputs, weights)


# Compiled as one function, which all layers share: lowering the kernels takes seconds.
@functools.partial(jax.jit, static_argnums=0)
def _forward(plan, inputs, weights):
    # Mosaic GPU takes half a second to import, and only runs that use it shall wait for it.
    from lm.ops.sketch_networks.gpu.forward import forward

    return forward(plan, inputs, *_operands(weights, inputs[0].dtype))


@functools.partial(jax.jit, static_argnums=0)
def _node_backward(plan, residuals, dpsi):
    from lm.ops.sketch_networks.gpu.backward import input_gradients, weight_gradients

    inputs, weights = residuals
    maps, biases = _operands(weights, inputs[0].dtype)
    *dxs, x, y, dy, df = input_gradients(plan, inputs, maps, biases, dpsi)
    lower = weight_gradients(plan, x, dy, *maps[:2], weights[4])
    upper = weight_gradients(plan, y, df, *maps[2:], weights[5])
    (dw1, dv1, dc1), (dw2, dv2, dc2) = ([g.sum(axis=1) for g in gradients] for gradients in (lower, upper))
    joined = [d.reshape(w.shape) for d, w in zip((dw1, dv1, dw2, dv2), weights[:4], strict=True)]
    return tuple(dxs), (*joined, dc1, dc2)


node.defvjp(_node_forward, _node_backward)


def _operands(weights: tuple[jax.Array, ...], dtype) -> tuple[list[jax.Array], jax.Array]:
    """The kernels' maps and biases."""
    return [w.astype(dtype) for w in weights[:4]], jnp.concatenate(weights[4:], axis=1)
