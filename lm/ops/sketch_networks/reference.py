"""The learned sketch as the paper writes it: readable, in one piece, in the precision of its inputs."""

import jax
import jax.numpy as jnp

from lm.ops.sketch_networks.types import EPSILON, NetworkWeights, Node, SketchCall, Sketched, climb


def sketch_networks(call: SketchCall) -> Sketched:
    """Computes any call."""
    sketches = tuple(climb(call.nodes, x_BxLxNxGxM, _join) for x_BxLxNxGxM in call.xs_BxLxNxGxM)
    return Sketched(sketches, call.xs_BxLxNxGxM)


def unsupported(call: SketchCall) -> None:
    """Everything is supported."""


def _join(node: Node, left: jax.Array, right: jax.Array) -> jax.Array:
    r = node.first.upper_narrow_NxExR.shape[-1]
    return r**0.5 * jnp.tanh(r**-0.5 * _network(node.first, left) * _network(node.second, right))


def _network(network: NetworkWeights, x_BxLxNxGxM: jax.Array) -> jax.Array:
    for level in network.levels:
        centred = x_BxLxNxGxM - x_BxLxNxGxM.mean(-1, keepdims=True)
        standard = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON)
        normal = standard * level.scale_Nx1xM + level.bias_Nx1xM
        x_BxLxNxGxM = _dense(jax.nn.gelu(_dense(normal, level.wide_NxMxE)), level.narrow_NxExR)
    return x_BxLxNxGxM


def _dense(x_BxLxNxGxM: jax.Array, kernel_NxMxE: jax.Array) -> jax.Array:
    return jnp.einsum('blngm,nme->blnge', x_BxLxNxGxM, kernel_NxMxE, precision='highest')
