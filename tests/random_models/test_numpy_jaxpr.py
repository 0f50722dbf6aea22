"""Programs computed by NumPy give what JAX computes, in one place or on several devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from numpy_jaxpr import CopiesDiffer, evaluate

X = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)


def run(function, *arrays):
    """Returns the results of the traced function, computed by NumPy."""
    found = evaluate(jax.make_jaxpr(function)(*arrays), *arrays)
    return found[0] if len(found) == 1 else found


def loop(x):
    return lax.while_loop(lambda pair: pair[0] < 3, lambda pair: (pair[0] + 1, pair[1] * 1.5 + x), (0, x))[1]


def scan(x):
    return lax.scan(lambda total, row: (total + row, jnp.sin(total)), x[0], x, reverse=True)[1]


FUNCTIONS = {
    'sort': lambda x: jnp.take_along_axis(x, jnp.argsort(x, axis=0), axis=0),
    'top_k': lambda x: lax.top_k(x, 2)[0],
    'gather': lambda x: x[jnp.array([3, 0, 3])] + x[:3, jnp.array([1])],
    'gather from batches': lambda x: jnp.take_along_axis(x, jnp.array([[5], [4], [0], [2]]), axis=1),
    'scatter': lambda x: x.at[jnp.array([0, 2])].set(1.0).at[:, jnp.array([1, 1])].add(2.0),
    'update': lambda x: lax.dynamic_update_slice(x, x[:2, :2] * 2, (3, 1)),
    'pad': lambda x: lax.pad(x, 0.5, ((-1, 2, 1), (2, -1, 0))),
    'ragged': lambda x: lax.ragged_dot(x, jnp.stack([x.T, 2 * x.T, -x.T]), jnp.array([1, 0, 3])),
    'while': loop,
    'scan': scan,
    'cond': lambda x: lax.cond(x[0, 0] > 0, jnp.cos, jnp.tanh, x),
    'integers': lambda x: (jnp.arange(-7, 8) // 3 + jnp.arange(-7, 8) % 4 + lax.div(jnp.arange(-7, 8), 2)) * 1.0,
    'sums': lambda x: jnp.cumsum(x, 0) + lax.cumsum(x, 1, reverse=True) + lax.cummax(x) + x.max() + x.prod(0),
    'softmax': lambda x: jax.nn.softmax(x) @ jax.nn.gelu(x).T + jax.nn.softplus(x)[:, :4],
    'remat': lambda x: jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(x).sum())(x),
    'custom': lambda x: jax.grad(lambda x: jax.nn.relu(x).sum() + jax.nn.logsumexp(x))(x),
}


@pytest.mark.parametrize('name', FUNCTIONS)
def test_numpy_computes_what_jax_computes(name):
    np.testing.assert_allclose(run(FUNCTIONS[name], X), FUNCTIONS[name](jnp.asarray(X)), rtol=1e-5, atol=1e-6)


def test_numbers_have_the_precision_of_float64():
    assert abs(run(lambda x: (x + 1e8) - 1e8, np.float32(0.25)) - 0.25) < 1e-7


def on_mesh(function, in_specs, out_specs, *arrays):
    """Returns what NumPy and JAX compute on a mesh (a, b) of 2 × 2 devices."""
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ('a', 'b'))
    with jax.set_mesh(mesh):
        split = jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return run(split, *arrays), jax.jit(split)(*arrays)


P = PartitionSpec
EXCHANGES = {
    'sum': (lambda x: lax.psum(x, 'a'), P('a', 'b'), P(None, 'b')),
    'mean': (lambda x: lax.pmean(x, ('a', 'b')), P('a', 'b'), P()),
    'gather': (lambda x: lax.all_gather(x, ('a', 'b'), axis=1, tiled=True), P(None, ('a', 'b')), P()),
    'scatter': (lambda x: lax.psum_scatter(x[:2], 'b', scatter_dimension=0), P(None, 'a'), P(('b', 'a'))),
    'permute': (lambda x: lax.ppermute(x, 'b', [(0, 1)]), P('a', 'b'), P('a', 'b')),
    'index': (lambda x: x + 10 * lax.axis_index('a') + lax.axis_index('b'), P('a', 'b'), P('a', 'b')),
    'all to all': (lambda x: lax.all_to_all(x, 'a', 0, 1, tiled=True), P('a', 'b'), P('a', 'b')),
    'branches': (lambda x: lax.cond(lax.axis_index('a') > 0, jnp.sin, jnp.cos, x), P('a', 'b'), P('a', 'b')),
}


@pytest.mark.parametrize('name', EXCHANGES)
def test_devices_exchange_what_jax_exchanges(name):
    x = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    ours, theirs = on_mesh(*EXCHANGES[name], x)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_map_inside_a_map_splits_further_axes():
    def inner(x):
        return lax.psum(x, 'b') + lax.axis_index('a')

    def outer(x):
        return jax.shard_map(inner, in_specs=P(None, 'b'), out_specs=P(), axis_names={'b'}, check_vma=False)(x)

    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ('a', 'b'))
    with jax.set_mesh(mesh):
        f = functools.partial(jax.shard_map, in_specs=P('a'), out_specs=P('a'), axis_names={'a'}, check_vma=False)(
            outer
        )
        np.testing.assert_allclose(run(f, X), jax.jit(f)(X), rtol=1e-5)


def test_copies_that_differ_are_an_error():
    with pytest.raises(CopiesDiffer, match='differ by'):
        on_mesh(lambda x: x, P('a'), P(), X)
