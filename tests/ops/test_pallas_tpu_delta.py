"""The TPU kernels of the delta rule, interpreted on the CPU, against the recurrence token by token."""

import functools

import grids
import jax
import jax.numpy as jnp
import nearness
import numpy as np
import pytest
from interpreter import interpret_kernels, interpret_plainly
from test_delta_rule import draw

from lm.ops import platform, sequence
from lm.ops.delta_rule import DeltaCall, DeltaResult, reference
from lm.ops.delta_rule.tpu import inverse as inverses
from lm.ops.delta_rule.tpu import parts, rule

pytestmark = pytest.mark.usefixtures('no_races')
NAMES = ('o', 'state', 'dq', 'dk', 'dv', 'dbeta', 'dg', 'dstate')
assert_near = functools.partial(nearness.assert_near, NAMES)


def both(function, *arrays):
    """Returns outputs, the last state, and the gradients of all arrays."""
    (o, state), pull = jax.vjp(function, *arrays)
    wanted = jnp.cos(jnp.arange(o.size)).reshape(o.shape).astype(o.dtype)
    return o, state, *pull(DeltaResult(wanted, jnp.sin(jnp.arange(state.size)).reshape(state.shape)))


def of_arrays(implementation, **static):
    return lambda *arrays: implementation.delta_rule(DeltaCall(*arrays, **static))


kernels = jax.jit(functools.partial(both, of_arrays(rule)))
recurrence = jax.jit(functools.partial(both, of_arrays(reference)))


def by_kernels(arrays):
    with interpret_kernels():
        return kernels(*arrays)


@pytest.mark.parametrize(
    ('length', 'dtype', 'tolerance'), [(300, jnp.float32, 3e-5), (256, jnp.bfloat16, 1.5e-2), (1, jnp.float32, 1e-5)]
)
def test_kernels_agree_with_the_recurrence(length, dtype, tolerance):
    """Two queries per key head, factors of 0, β up to 2, an initial state, sizes that fill no register."""
    arrays = draw(length, seed=length, dtype=dtype)
    assert_near(by_kernels(arrays), recurrence(*(a.astype(jnp.float32) for a in arrays)), tolerance)


GATES = [[0.0], [-1e-8], [-104.0], [-1e4], [0.0, -1e-8, -104.0, -1e4]]


@pytest.mark.parametrize('gates', grids.draw(GATES, 3), ids=str)
def test_gates_of_any_size(gates):
    arrays = list(draw(300))
    arrays[4] = jnp.asarray(np.random.default_rng(1).choice(gates, size=arrays[4].shape), jnp.float32)
    assert_near(by_kernels(arrays), recurrence(*arrays), 3e-5)


def test_calls_without_factors_agree_too():
    q, k, v, beta, decay, state = draw(300)
    arrays = (q, k, v, beta, jnp.zeros_like(decay), state)
    with interpret_kernels():
        o = jax.jit(of_arrays(rule))(q, k, v, beta, None, state)[0]
    np.testing.assert_allclose(o, by_kernels(arrays)[0], rtol=0, atol=1e-6)
    assert_near(by_kernels(arrays), recurrence(*arrays), 1e-5)


def test_vectors_are_normalized():
    q, k, *rest = draw(130)
    arrays = (3 * q, k.at[:, 7].set(0.0) / 2, *rest)
    of_length = (of_arrays(each, query_length=0.5) for each in (rule, reference))
    got, expected = (functools.partial(both, function) for function in of_length)
    with interpret_kernels():
        got = jax.jit(got)(*arrays)
    assert_near(got, jax.jit(expected)(*arrays), 3e-5)


@pytest.mark.parametrize('beta', [1.0, 2.0])
def test_a_repeated_key_stays_exact(beta):
    q, k, v, *_ = draw(300)
    k = jnp.broadcast_to(k[:, :1], k.shape)
    arrays = (q, k, v, jnp.full(k.shape[:3], beta, k.dtype), jnp.zeros(k.shape[:3]), jnp.zeros((2, 2, 8, 12)))
    assert_near(by_kernels(arrays), recurrence(*arrays), 1e-3)


def test_forgotten_tokens_change_nothing():
    q, k, v, beta, decay, state = draw(300)
    decay = decay.at[:, 150].set(-jnp.inf)
    arrays = (q, k, v, beta, decay, state)
    o = by_kernels(arrays)[0]
    wild = by_kernels((q, k.at[:, 30].mul(50), v.at[:, 140].set(1e4), beta, decay, state))[0]
    np.testing.assert_array_equal(o[:, 150:], wild[:, 150:])


def test_later_tokens_change_nothing():
    q, k, v, *rest = draw(300)
    o = by_kernels((q, k, v, *rest))[0]
    other = by_kernels((q, k.at[:, 130].set(-k[:, 130]), v.at[:, 130].add(1.0), *rest))[0]
    np.testing.assert_array_equal(o[:, :130], other[:, :130])
    assert (o[:, 130:] != other[:, 130:]).any()


@pytest.mark.parametrize(('split', 'tolerance'), [(False, 2e-6), (True, 1e-4)])
@pytest.mark.parametrize('same', [False, True])
def test_inverse(split, tolerance, same, monkeypatch):
    """With one repeated key, the powers of the matrix reach 10^37."""
    rng = np.random.default_rng(0)
    k = np.repeat(rng.normal(size=(64, 1)), 128, 1) if same else rng.normal(size=(64, 128))
    k /= np.linalg.norm(k, axis=0)
    m = np.triu(2 * k.T @ k, 1)

    monkeypatch.setattr(inverses, '_roll', lambda x, by: jnp.roll(x, by, 1))

    def solved():
        turns = inverses.inverse(jnp.asarray(m, jnp.float32), split)
        while True:
            try:
                next(turns)
            except StopIteration as done:
                return done.value

    np.testing.assert_allclose(jax.jit(solved)(), np.linalg.inv(np.eye(128) + m), atol=tolerance)


def outputs_and_gradients(function, *tokens):
    o, pull = jax.vjp(function, *tokens)
    return o, *pull(jnp.cos(jnp.arange(o.size)).reshape(o.shape))


@functools.cache
def of_whole_window(length):
    """Computes the expected results of the parts from the whole window, token by token."""

    def whole(*tokens):
        return reference.delta_rule(DeltaCall(*tokens)).o_BxLxHxD

    return jax.jit(functools.partial(outputs_and_gradients, whole))(*draw(length)[:-1])


@pytest.mark.parametrize('devices', grids.draw([2, 4], 1))
def test_parts_of_a_window(devices):
    *tokens, _ = draw(600)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), (platform.SEQUENCE_AXIS,))

    def on_parts(*tokens):
        return sequence.over_tokens(lambda *a: of_arrays(parts)(*a).o_BxLxHxD, (1,) * len(tokens))(*tokens)

    with jax.set_mesh(mesh), interpret_plainly():
        got = jax.jit(functools.partial(outputs_and_gradients, on_parts))(*tokens)
    for a, e in zip(got, of_whole_window(600), strict=True):
        assert np.linalg.norm(a - e) <= 1e-4 * np.linalg.norm(e)
