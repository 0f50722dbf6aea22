"""Traces of `lm check --gradients` in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from lm.check.float64 import widen_program
from lm.errors import LmError
from lm.ops.custom_vjp import custom_vjp

X = np.random.default_rng(0).normal(size=(5, 4))


def compute(function, *arguments):
    """Returns the results of a function in float64."""
    return widen_program(jax.make_jaxpr(function)(*arguments))(*arguments)


def check(function, expected, *arguments):
    (found,) = compute(function, *arguments)
    np.testing.assert_allclose(found, expected, rtol=1e-13, atol=1e-13)


def test_casts_keep_float64():
    (found,) = compute(lambda x: (x.astype(jnp.bfloat16) * 2).astype(jnp.float32) / 3, X)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, X * 2 / 3, rtol=1e-15)
    check(lambda x: (3.7 * x).astype(jnp.int32), (3.7 * X).astype(int), X)


def test_slices_and_indices():
    at = np.array([3, 0, 3])
    check(lambda x: x[at], X[at], X)
    check(lambda x: x[:, 1:4:2], X[:, 1:4:2], X)
    check(lambda x: jnp.take_along_axis(x, jnp.argsort(x, axis=1)[:, :2], axis=1), np.sort(X, axis=1)[:, :2], X)
    check(lambda x: x.at[at].add(x[:3]), X + _sum_into(X), X)
    check(lambda x: x.at[1:3, 2].set(7.0), np.where(_mask(slice(1, 3), 2), 7, X), X)
    check(lambda x: x.at[np.array([9, 1])].set(7.0, mode='drop'), np.where(_mask(1, slice(None)), 7, X), X)
    check(lambda x: lax.dynamic_slice(x, (4, 1), (3, 2)), X[2:, 1:3], X)
    check(lambda x: lax.dynamic_update_slice(x, x[:2, :2] * 0, (9, 0)), np.where(_mask(slice(3, 5), slice(2)), 0, X), X)
    check(lambda x: lax.pad(x, 1.0, [(1, 0, 1), (-1, 0, 0)])[1::2], X[:, 1:], X)
    check(lambda x: jnp.tile(x, (2, 3)), np.tile(X, (2, 3)), X)
    check(lambda x: lax.top_k(x, 2)[0], np.sort(X, axis=1)[:, :1:-1], X)


def _mask(*places):
    mask = np.zeros(X.shape, bool)
    mask[places] = True
    return mask


def _sum_into(x):
    added = np.zeros(x.shape)
    np.add.at(added, [3, 0, 3], x[:3])
    return added


def test_products():
    y, matrices = X[:4, :3], np.random.default_rng(1).normal(size=(3, 4, 2))
    check(lambda x, y: jnp.einsum('ab,bc->ca', x, y), (X @ y).T, X, y)
    check(lambda x: jnp.einsum('ab,ab->b', x, x), (X * X).sum(0), X)
    sizes = np.array([2, 0, 3], np.int32)
    grouped = np.concatenate([X[:2] @ matrices[0], X[2:] @ matrices[2]])
    check(lambda x, m: lax.ragged_dot(x, m, sizes), grouped, X, matrices)
    lower = np.tril(X[:4]) + 3 * np.eye(4)
    solve = lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True)  # noqa: E731
    check(solve, np.linalg.solve(lower, y), lower, y)


def test_gradient_of_grouped_products_is_their_transpose():
    matrices, sizes = np.random.default_rng(1).normal(size=(3, 4, 2)), np.array([2, 0, 3], np.int32)
    d_x, d_m = compute(jax.grad(lambda x, m: lax.ragged_dot(x, m, sizes).sum(), (0, 1)), X, matrices)
    np.testing.assert_allclose(d_x, np.repeat(matrices.sum(2)[[0, 2]], [2, 3], axis=0))
    np.testing.assert_allclose(d_m[..., 0], np.stack([X[:2].sum(0), 0 * X[0], X[2:].sum(0)]))


def test_loops_and_branches():
    check(lambda x: lax.scan(lambda c, row: (c + row, c), x[0], x)[0], X[0] + X.sum(0), X)
    check(lambda x: lax.scan(lambda c, row: (c, row), x[0], x, reverse=True)[1], X, X)
    check(lambda x: lax.while_loop(lambda s: s.sum() < 100, lambda s: s * 2, abs(x)), _double(abs(X)), X)
    check(lambda x: lax.cond(x[0, 0] > 9, lambda x: x, lambda x: -x, x), -X, X)
    check(lambda x: jnp.cumsum(x, axis=0)[::-1], np.cumsum(X, axis=0)[::-1], X)
    check(lambda x: lax.cummax(x, reverse=True), np.maximum.accumulate(X[::-1])[::-1], X)


def _double(x):
    while x.sum() < 100:
        x = x * 2
    return x


def test_a_gradient_has_the_rule_that_its_function_states():
    @custom_vjp()
    def double(x):
        return 2 * x

    double.defvjp(lambda x: (2 * x, None), lambda _, d: (5 * d,))
    check(lambda x: double(x).sum(), 2 * X.sum(), X)
    check(jax.grad(lambda x: double(x).sum()), np.full(X.shape, 5.0), X)
    check(jax.grad(jax.checkpoint(lambda x: jnp.tanh(x).sum())), 1 - np.tanh(X) ** 2, X)


def test_random_numbers_have_the_distribution_and_follow_the_key():
    def draw(seed):
        keys = jax.random.split(jax.random.key(seed))
        return jax.random.normal(keys[0], (2000,)), jax.random.uniform(keys[1], (2000,))

    normal, uniform = compute(draw, 3)
    assert abs(normal.mean()) < 0.1
    assert abs(normal.std() - 1) < 0.1
    assert 0 <= uniform.min() < 0.01
    assert 0.99 < uniform.max() < 1
    np.testing.assert_array_equal(compute(draw, 3)[0], normal)
    assert not np.array_equal(compute(draw, 4)[0], normal)


def test_a_kernel_is_named():
    kernel = jax.ffi.ffi_call('square', jax.ShapeDtypeStruct(X.shape, jnp.float32))
    with pytest.raises(LmError, match='ffi_call: a kernel has no float64 form'):
        compute(kernel, X)
