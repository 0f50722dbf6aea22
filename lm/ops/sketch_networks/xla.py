"""The learned sketch in plain XLA, some tokens at a time; the backward pass computes their hidden layers again."""

import jax
import jax.numpy as jnp

from lm.ops.chunks import map_together
from lm.ops.dots import dense
from lm.ops.formulas import EPSILON, climb_tree
from lm.ops.sketch_networks.types import NetworkWeights, Node, SketchCall, Sketched


def sketch_networks(call: SketchCall) -> Sketched:
    """Computes any call."""
    copies = len(call.nodes) + 1
    sketches = map_together(lambda nodes, x_BxLxNxGxM: climb_tree(nodes, [x_BxLxNxGxM] * copies, _join), *call)
    return Sketched(sketches, call.xs_BxLxNxGxM)


def _join(node: Node, left: jax.Array, right: jax.Array) -> jax.Array:
    r = node.first.upper.narrow_NxExR.shape[-1]
    product = _network(node.first, left) * _network(node.second, right)
    # Bounded by √r, so that weights stay in range while the networks learn.
    return (r**0.5 * jnp.tanh(r**-0.5 * product)).astype(left.dtype)


def _network(network: NetworkWeights, x_BxLxNxGxM: jax.Array) -> jax.Array:
    """Returns [B, L, N, G, r] in float32."""
    x, dtype = x_BxLxNxGxM, x_BxLxNxGxM.dtype
    for level in network:
        x = jax.nn.standardize(x.astype(jnp.float32), axis=-1, epsilon=EPSILON)
        x = (x * level.scale_Nx1xM + level.bias_Nx1xM).astype(dtype)
        x = jax.nn.gelu(dense(x, level.wide_NxMxE).astype(dtype))
        x = dense(x, level.narrow_NxExR)
    return x
