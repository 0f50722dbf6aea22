"""The learned sketch as the paper writes it: readable, in one piece, in the precision of its inputs."""

import jax
import jax.numpy as jnp

from lm.ops.formulas import apply_network, join_sketches
from lm.ops.sketch_networks.types import NetworkWeights, Node, SketchCall, Sketched, climb


def sketch_networks(call: SketchCall) -> Sketched:
    """Computes any call."""
    sketches = tuple(climb(call.nodes, x_BxLxNxGxM, _join) for x_BxLxNxGxM in call.xs_BxLxNxGxM)
    return Sketched(sketches, call.xs_BxLxNxGxM)


def unsupported(call: SketchCall) -> None:
    """Everything is supported."""


def _join(node: Node, left: jax.Array, right: jax.Array) -> jax.Array:
    with jax.default_matmul_precision('highest'):
        return join_sketches(jnp, _apply(node.first, left), _apply(node.second, right))


def _apply(network: NetworkWeights, x_BxLxNxGxM: jax.Array) -> jax.Array:
    levels = [(one.scale_Nx1xM, one.bias_Nx1xM, one.wide_NxMxE, one.narrow_NxExR) for one in network.levels]
    return apply_network(jnp, levels, x_BxLxNxGxM)
