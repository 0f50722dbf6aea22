"""The delta rule in chunks against the recurrence token by token, around the ends of chunks and at extremes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.ops.delta_rule import delta_rule, system, xla
from lm.ops.errors import OperationError

LENGTHS = [1, 65, 130]


def draw(length, seed=0, dtype=jnp.float32):
    """Returns q, k, v, beta, log_decay with resets, and an initial state."""
    keys = jax.random.split(jax.random.key(seed), 7)
    q, k = (jax.random.normal(key, (2, length, n, 8)) for key, n in zip(keys, (4, 2), strict=False))
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = jax.random.normal(keys[2], (2, length, 2, 12))
    beta = 2 * jax.nn.sigmoid(jax.random.normal(keys[3], (2, length, 2)))
    decay = -jax.nn.softplus(jax.random.normal(keys[4], (2, length, 2)) - 3)
    decay = jnp.where(jax.random.uniform(keys[5], decay.shape) < 0.02, -jnp.inf, decay)
    return *(x.astype(dtype) for x in (q, k, v)), beta, decay, jax.random.normal(keys[6], (2, 2, 8, 12))


def results(arrays, implementation):
    """Returns outputs, the last state, and the gradients of a function of both by all arrays."""

    def loss(*arrays):
        *tokens, state = arrays
        o, state = delta_rule(*tokens, initial_state=state, return_state=True, implementation=implementation)
        return jnp.sin(o.astype(jnp.float32)).sum() + (state**2).sum(), (o, state)

    (_, outputs), gradients = jax.jit(jax.value_and_grad(loss, range(len(arrays)), has_aux=True))(*arrays)
    return [*outputs, *gradients]


def check(found, expected, tolerance):
    for a, b in zip(found, expected, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.isfinite(a).all()
        assert np.abs(a - b).max() <= tolerance * max(1.0, np.abs(b).max())


@pytest.mark.parametrize('length', LENGTHS)
def test_chunks_agree_with_the_recurrence(length, monkeypatch):
    monkeypatch.setattr(xla, 'SEGMENT', 128)
    arrays = draw(length)
    check(results(arrays, 'xla'), results(arrays, 'reference'), 2e-6)


def test_bfloat16():
    arrays = draw(130, dtype=jnp.bfloat16)
    check(results(arrays, 'xla')[:2], results(arrays, 'reference')[:2], 1e-2)


@pytest.mark.parametrize('beta', [1.0, 2.0])
def test_a_repeated_key_stays_exact(beta):
    """The powers of such a chunk's system reach 10^18, but its inverse stays at 1 (or 2): it is solved, not
    expanded."""
    q, k, v, *_ = draw(128)
    k = jnp.broadcast_to(k[:, :1], k.shape)
    arrays = (q, k, v, jnp.full(k.shape[:3], beta), jnp.zeros(k.shape[:3]), jnp.zeros((2, 2, 8, 12)))
    check(results(arrays, 'xla'), results(arrays, 'reference'), 1e-3)


def test_forgotten_tokens_change_nothing():
    q, k, v, beta, decay, state = draw(100)
    decay = decay.at[:, 70].set(-jnp.inf)
    whole = delta_rule(q, k, v, beta, decay, initial_state=state)
    late = delta_rule(q[:, 70:], k[:, 70:], v[:, 70:], beta[:, 70:], decay[:, 70:])
    np.testing.assert_allclose(whole[:, 70:], late, atol=1e-6)
    wild = delta_rule(q, k.at[:, 30].mul(50), v.at[:, 30].set(1e4), beta, decay, initial_state=state)
    np.testing.assert_array_equal(whole[:, 70:], wild[:, 70:])


def test_heads_must_fit():
    q, k, v, beta, *_ = draw(4)
    with pytest.raises(OperationError, match=r'n_kv_heads = 2: must divide n_heads = 3'):
        delta_rule(q[:, :, :3], k, v, beta)


@pytest.mark.parametrize('size', [1, 5, 8, 37, 64])
@pytest.mark.parametrize('spread', [0.01, 1.0])
def test_systems_are_solved_about_as_precisely_as_by_substitution(size, spread):
    rng = np.random.default_rng(size)
    k = rng.standard_normal(16) + spread * rng.standard_normal((2, 1, 3, size, 16))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    a = np.tril(2 * k @ k.mT, -1).astype(np.float32)
    given, dresult = rng.standard_normal((2, 2, 1, 3, size, 7)).astype(np.float32)
    result, pull = jax.vjp(jax.jit(system.solve), a, given)

    def solve_by(solver, a, given, dresult):
        result, dgiven = solver(a, given, False), solver(a, dresult, True)
        return result, np.tril(-dgiven @ result.mT, -1), dgiven

    def substitute(a, given, transposed):
        u = given.copy()
        for i in reversed(range(size)) if transposed else range(size):
            for j in range(i + 1, size) if transposed else range(i):
                u[..., i, :] -= (a[..., j, i, None] if transposed else a[..., i, j, None]) * u[..., j, :]
        return u

    def solve_exactly(a, given, transposed):
        whole = np.eye(size) + a.astype(np.float64)
        return np.linalg.solve(whole.mT if transposed else whole, given.astype(np.float64))

    ours, plain, exact = (
        (result, *pull(dresult)),
        *(solve_by(s, a, given, dresult) for s in (substitute, solve_exactly)),
    )
    for found, other, expected in zip(ours, plain, exact, strict=True):
        allowed = 6 * np.abs(other - expected).max() + 1e-6 * np.abs(expected).max()
        assert np.abs(found - expected).max() <= allowed
