"""The learned sketch as the paper writes it: readable, in one piece, in the precision of its inputs."""

import jax
import jax.numpy as jnp

from lm.ops.formulas import apply_network, climb_tree, join_sketches
from lm.ops.sketch_networks.types import Node, SketchCall, Sketched


def sketch_networks(call: SketchCall) -> Sketched:
    """Computes any call."""
    copies = len(call.nodes) + 1
    sketches = tuple(climb_tree(call.nodes, [x_BxLxNxGxM] * copies, _join) for x_BxLxNxGxM in call.xs_BxLxNxGxM)
    return Sketched(sketches, call.xs_BxLxNxGxM)


def _join(node: Node, left: jax.Array, right: jax.Array) -> jax.Array:
    with jax.default_matmul_precision('highest'):
        return join_sketches(jnp, apply_network(jnp, node.first, left), apply_network(jnp, node.second, right))
