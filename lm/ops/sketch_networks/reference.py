"""The learned sketch as the paper writes it: readable, in one piece, in the precision of its inputs."""

import jax
import jax.numpy as jnp

from lm.ops.sketch_networks.types import EPSILON, NetworkWeights, Nodes, Sketched, climb


def sketch_networks(nodes: Nodes, xs_BxLxNxGxM: tuple[jax.Array, ...]) -> Sketched:
    """Arguments as in `lm.ops.sketch_networks`."""
    return Sketched(tuple(climb(nodes, x_BxLxNxGxM, _join) for x_BxLxNxGxM in xs_BxLxNxGxM), xs_BxLxNxGxM)


def unsupported(nodes: Nodes, xs: tuple[jax.Array, ...]) -> str | None:
    return None


def _join(first: NetworkWeights, second: NetworkWeights, left: jax.Array, right: jax.Array) -> jax.Array:
    r = first.kernels[-1].shape[-1]
    return r**0.5 * jnp.tanh(r**-0.5 * _network(first, left) * _network(second, right))


def _network(network: NetworkWeights, x_BxLxNxGxM: jax.Array) -> jax.Array:
    for i in range(2):
        centred = x_BxLxNxGxM - x_BxLxNxGxM.mean(-1, keepdims=True)
        standard = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON)
        normal = standard * network.scales[i] + network.biases[i]
        x_BxLxNxGxM = _dense(jax.nn.gelu(_dense(normal, network.kernels[2 * i])), network.kernels[2 * i + 1])
    return x_BxLxNxGxM


def _dense(x_BxLxNxGxM: jax.Array, kernel_NxMxE: jax.Array) -> jax.Array:
    return jnp.einsum('blngm,nme->blnge', x_BxLxNxGxM, kernel_NxMxE, precision='highest')
