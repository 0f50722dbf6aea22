"""Products with the matrices of a layer: their parts, types and gradients, with whole and sharded matrices."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from lm.model.dense import Dense
from lm.pod.mesh import MeshConfig, make_mesh

SIZES = [24, 8]


def made(bias: bool, dtype=jnp.float32) -> Dense:
    module = Dense(16, sum(SIZES), use_bias=bias, dtype=dtype, rngs=nnx.Rngs(0))
    if bias:
        module.bias[...] = jnp.linspace(-1, 1, sum(SIZES))
    return module


def tokens(dtype=jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=(4, 5, 16)), dtype)


@pytest.mark.parametrize('bias', [False, True])
def test_pieces_are_the_parts_of_a_linear_layer(bias):
    module, x = made(bias), tokens()
    linear = nnx.Linear(16, sum(SIZES), use_bias=bias, rngs=nnx.Rngs(0))
    nnx.update(linear, nnx.state(module))

    def loss(module, product):
        parts = product(module)
        return sum(jnp.sum(jnp.sin(part) * (i + 1)) for i, part in enumerate(parts))

    whole = jnp.split(linear(x), SIZES[:1], axis=-1)
    for ours, theirs in zip(module.pieces(x, SIZES), whole, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(module(x), linear(x), rtol=1e-5, atol=1e-6)
    ours = nnx.grad(loss)(module, lambda m: m.pieces(x, SIZES))
    theirs = nnx.grad(loss)(linear, lambda m: jnp.split(m(x), SIZES[:1], axis=-1))
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5)


def test_products_have_the_dtype_of_the_layer():
    assert made(True, jnp.bfloat16)(tokens(jnp.float32)).dtype == jnp.bfloat16
    assert made(True, jnp.float32)(tokens(jnp.bfloat16)).dtype == jnp.float32


def test_sharded_matrices_are_gathered_and_their_gradients_scattered():
    module, x = made(False, jnp.bfloat16), tokens()
    expected = nnx.grad(lambda m: jnp.sum(m(x).astype(jnp.float32) ** 2))(module).kernel[...]
    mesh = make_mesh(MeshConfig(fsdp=4), jax.devices()[:4])
    sharded = NamedSharding(mesh, PartitionSpec(None, 'fsdp'))
    kernel = jax.device_put(module.kernel[...], sharded)
    rows = jax.device_put(x, NamedSharding(mesh, PartitionSpec(('data', 'fsdp'))))

    def loss(kernel, x):
        graph, state = nnx.split(module)
        state['kernel'] = state['kernel'].replace(kernel)
        parts = nnx.merge(graph, state).pieces(x, SIZES)
        return sum(jnp.sum(part.astype(jnp.float32) ** 2) for part in parts)

    with jax.set_mesh(mesh):
        step = jax.jit(jax.grad(loss)).lower(kernel, rows).compile()
    found = step(kernel, rows)
    assert found.sharding.is_equivalent_to(sharded, 2)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-2 * np.abs(expected).max())  # both are bfloat16 sums
    shapes = re.findall(r'= \w+\[([\d,]*)\]\S* all-gather', step.as_text())
    assert set(shapes) == {'4,8,16'}  # the matrix in parts, not the activations
