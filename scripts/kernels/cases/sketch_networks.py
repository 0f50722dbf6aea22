"""The networks of one learned sketch."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from lm.attention import HeadDims
from lm.attention.maps.sketches import Network
from lm.ops.sketch_networks import Node, sketch_networks
from lm.ops.sketch_networks.tpu import networks as kernels
from scripts.kernels.cases.base import Case, KernelCall


def cases() -> dict[str, Case]:
    found: dict[str, Case] = {f'sketch networks r={r}': functools.partial(networks_call, r, 8) for r in (32, 64)}
    return found | {'sketch networks r=32 width=4': functools.partial(networks_call, 32, 4)}


def networks_call(r: int, width: int, dims: HeadDims, length: int) -> KernelCall:
    """Returns a call that computes r numbers per query and key, with networks of `width` r hidden units."""
    network = jax.eval_shape(lambda: Network(1, dims.head_dim, r, width, nnx.Rngs(0)).parameters())
    heads = (dims.n_heads, dims.n_kv_heads)
    qk = (jax.ShapeDtypeStruct((1, length, 1, n, dims.head_dim), jnp.bfloat16) for n in heads)

    def function(nodes, q, k):
        return sketch_networks(nodes, q, k, implementation='pallas_tpu')

    plan = kernels.plan_for(length, dims.n_heads, dims.head_dim, width * r, r, 2)
    tokens = {'forward': plan.forward_tile / 2, 'backward': plan.block / 2}  # a grid step takes queries or keys
    steps = {(kernel, f'sketch_networks_{kernel}'): n for kernel, n in tokens.items()}
    return KernelCall(function, ((Node(network, network),), *qk), steps)
