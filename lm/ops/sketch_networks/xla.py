"""The learned sketch in plain XLA, some tokens at a time; the backward pass computes their hidden layers again."""

import jax
import jax.numpy as jnp

from lm.ops.chunks import map_together
from lm.ops.dots import dense
from lm.ops.sketch_networks.types import EPSILON, NetworkWeights, Nodes, Sketched, climb


def sketch_networks(nodes: Nodes, xs_BxLxNxGxM: tuple[jax.Array, ...]) -> Sketched:
    """Arguments as in `lm.ops.sketch_networks`."""
    sketches = map_together(lambda nodes, x_BxLxNxGxM: climb(nodes, x_BxLxNxGxM, _join), nodes, xs_BxLxNxGxM)
    return Sketched(sketches, xs_BxLxNxGxM)


def unsupported(nodes: Nodes, xs: tuple[jax.Array, ...]) -> str | None:
    return None


def _join(first: NetworkWeights, second: NetworkWeights, left: jax.Array, right: jax.Array) -> jax.Array:
    r = first.kernels[-1].shape[-1]
    product = _network(first, left) * _network(second, right)
    # Bounded by √r, so that weights stay in range while the networks learn.
    return (r**0.5 * jnp.tanh(r**-0.5 * product)).astype(left.dtype)


def _network(network: NetworkWeights, x_BxLxNxGxM: jax.Array) -> jax.Array:
    """[B, L, N, G, r] float32."""
    x, dtype = x_BxLxNxGxM, x_BxLxNxGxM.dtype
    for i in range(2):
        x = jax.nn.standardize(x.astype(jnp.float32), axis=-1, epsilon=EPSILON)
        x = (x * network.scales[i] + network.biases[i]).astype(dtype)
        x = jax.nn.gelu(dense(x, network.kernels[2 * i]).astype(dtype))
        x = dense(x, network.kernels[2 * i + 1])
    return x
