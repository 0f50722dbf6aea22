"""Hybrid attention: its polynomials, its state, and softmax models run with it."""

import functools
import math

import jax
import jax.numpy as jnp
import mechanisms
import numpy as np
import pytest
from flax import nnx

from lm.attention import HeadDims
from lm.attention.hybrid import Hybrid
from lm.attention.maps.monomials import APPROXIMATIONS, Monomials, n_terms
from lm.attention.softmax import Softmax
from lm.errors import ConfigError
from lm.model import ModelConfig, Transformer

DIMS = HeadDims(n_heads=2, n_kv_heads=1, head_dim=8)


def inputs(**options):
    """Returns vectors of length one half: their scores stay in the interval where the polynomials are positive."""
    return mechanisms.draw(dims=DIMS, size=0.5, **options)


@pytest.mark.parametrize('config', [Hybrid(window=8), Hybrid(window=100)], ids=str)
def test_steps_equal_the_whole(config):
    shapes = mechanisms.check_steps(mechanisms.build(config, DIMS), inputs())
    assert shapes.recent.k_BxSxKxE == (2, config.window, 1, 8)


def test_a_window_over_all_keys_is_softmax():
    q, k, v = mechanisms.draw(dims=DIMS, size=3.0)
    exact = mechanisms.apply(Softmax().build(DIMS, nnx.Rngs(0)), q, k, v)
    found = mechanisms.apply(mechanisms.build(Hybrid(window=45), DIMS), q, k, v)
    np.testing.assert_allclose(found, exact, atol=1e-5)


def test_high_degrees_approach_softmax():
    q, k, v = inputs()
    exact = mechanisms.apply(Softmax().build(DIMS, nnx.Rngs(0)), q, k, v)
    errors = []
    for degree in (1, 2, 3):
        approximate = mechanisms.apply(mechanisms.build(Hybrid(window=2, degree=degree), DIMS), q, k, v)
        errors.append(float(jnp.linalg.norm(approximate - exact) / jnp.linalg.norm(exact)))
    assert errors[0] > 3 * errors[1] > 9 * errors[2]


@pytest.mark.parametrize('degree', [2, 3, 4])
def test_weighing_each_pair_equals_sums_of_terms(degree):
    sums, pairs = (
        mechanisms.build(Hybrid(window=5, degree=degree, implementation=name), DIMS) for name in (None, 'reference')
    )
    q, k, v = inputs()
    np.testing.assert_allclose(mechanisms.apply(pairs, q, k, v), mechanisms.apply(sums, q, k, v), atol=2e-5)
    with pytest.raises(ConfigError, match=r"hybrid\.implementation = 'reference': .* set it to None"):
        pairs.init_state(1, 8, jnp.float32)


@functools.cache
def squares():
    """Returns a module and a program for the summed squares of its outputs and their gradients."""
    module = mechanisms.build(Hybrid(window=6), DIMS)
    return module, jax.jit(jax.value_and_grad(lambda *x: jnp.sum(module(*x) ** 2), (0, 1, 2)))


@pytest.mark.parametrize('score', [-300.0, -90.0, 90.0, 300.0])
def test_large_scores_stay_finite(score):
    """Eq. 2.3-2.4 with m = max(scores): exp(300) overflows, and exp(-300) must not leave 0 / 0."""
    module, run = squares()
    q, k, v = mechanisms.draw(dims=DIMS)
    q = jnp.zeros_like(q).at[..., 0].set(8**0.5)
    k = k.at[..., 0].set(score)
    o, gradients = run(q, k, v)
    assert np.isfinite(o)
    assert all(np.isfinite(g).all() for g in gradients)
    # With equal scores and only recent keys, the output is the mean of the values.
    np.testing.assert_allclose(mechanisms.apply(module, q, k, v)[:, 5, 0], v[:, :6, 0].mean(1), atol=1e-4)
    first = mechanisms.decode_step(module, module.init_state(2, 9, jnp.float32), q[:, :1], k[:, :1], v[:, :1])[1]
    np.testing.assert_allclose(first, jnp.repeat(v[:, :1], 2, axis=2), atol=1e-5)


@pytest.mark.parametrize(
    ('d', 'n', 'p', 'sums'),
    [
        (2, 2, 1, 6), (4, 1, 1, 5), (4, 2, 1, 15), (4, 3, 1, 35), (4, 1, 2, 9), (4, 2, 2, 36), (4, 3, 2, 100),
        (8, 3, 4, 10_000), (16, 2, 1, 153), (16, 2, 8, 1_679_616), (32, 3, 1, 6545), (32, 2, 4, 4_100_625),
        (64, 1, 1, 65), (64, 2, 1, 2145), (64, 1, 2, 1089), (64, 2, 2, 314_721), (64, 3, 1, 47_905),
        (128, 3, 1, 366_145), (256, 2, 1, 33_153), (256, 1, 2, 16_641),
    ],
)  # fmt: skip
def test_state_sizes_are_the_papers(d, n, p, sums):
    """The sizes come from §4, §5 and the table under eq. 6.4."""
    assert n_terms(d, n, p) == sums
    if sums <= 2000:
        monomials = Monomials(n, p)
        assert jax.eval_shape(lambda x: monomials((), x, False), jax.ShapeDtypeStruct((d,), jnp.float32)).shape == (
            sums,
        )
        assert monomials.weights(np.ones(n + 1), d).shape == (sums,)


def test_sums_are_shared_by_grouped_queries():
    """§5.4: the state holds one set of sums per key head."""
    state = Hybrid(parts=2, degree=1).build(HeadDims(8, 2, 16), nnx.Rngs(0)).init_state(3, 10, jnp.float32)
    assert state.sums.kv_BxKxRxD.shape == (3, 2, n_terms(16, 1, 2), 16)
    assert state.recent.v_BxSxKxD.shape == (3, 200, 2, 16)


@pytest.mark.parametrize('radius', [0.5, 1.0, 3.0])
@pytest.mark.parametrize('degree', [1, 2, 3, 5])
def test_polynomials_of_exp(degree, radius):
    x = np.linspace(-radius, radius, 4001)
    errors = {}
    for name, approximate in APPROXIMATIONS.items():
        error = np.exp(x) - np.polynomial.polynomial.polyval(x, approximate(degree, radius))
        errors[name] = np.abs(error).max()
        if name == 'minimax':  # errors of equal size and alternating sign: no polynomial does better
            parts = np.split(error, np.flatnonzero(np.diff(np.sign(error))) + 1)
            assert len(parts) == degree + 2
            np.testing.assert_allclose([np.abs(part).max() for part in parts], errors['minimax'], rtol=1e-3)
    assert errors['minimax'] < errors['chebyshev'] < errors['taylor']
    assert errors['chebyshev'] < 2 * errors['minimax']


def test_taylor_errors_are_the_papers_table():
    """§3 gives relative errors in per cent at x = 1 and x = 2."""
    for x, expected in ((1.0, [26, 8, 2, 0]), (2.0, [59, 32, 14, 5])):
        found = [
            1 - np.polynomial.polynomial.polyval(x, APPROXIMATIONS['taylor'](n, 1.0)) / math.exp(x)
            for n in (1, 2, 3, 4)
        ]
        assert [round(100 * f) for f in found] == expected


def test_a_softmax_model_runs_under_it():
    """Both have the same tree of parameters. Windows as long as the text give the same logits."""
    options = dict(vocab_size=50, n_layers=2, d_model=16, n_heads=2, head_dim=8)
    trained = Transformer(ModelConfig(**options, attention=Softmax()), nnx.Rngs(params=0, projections=1))
    state = nnx.state(trained)
    tokens = jax.random.randint(jax.random.key(0), (2, 24), 0, 50)
    exact = mechanisms.apply(trained, tokens)
    for window, tolerance in ((24, 1e-5), (12, 0.1)):
        other = Transformer(ModelConfig(**options, attention=Hybrid(window=window)), nnx.Rngs(params=5, projections=6))
        assert jax.tree.structure(nnx.state(other)) == jax.tree.structure(state)
        nnx.update(other, state)
        found = mechanisms.apply(other, tokens)
        assert float(jnp.abs(found - exact).mean()) < tolerance
    changed = tokens.at[0, 13].set(7)
    np.testing.assert_array_equal(found[:, :13], mechanisms.apply(other, changed)[:, :13])


def test_cost():
    dims, length = HeadDims(12, 12, 64), 8192
    flops = Hybrid(window=200).flops_per_token(dims, length)
    older = 2 * 2145 * (64 * 24 + 12) * (1 - 128 / 7992) + 12 * 128 * 128
    assert flops == pytest.approx(4 * 12 * 64 * 200 + older, rel=0.03)
    assert Hybrid(window=200).flops_per_token(dims, 200) == Softmax().flops_per_token(dims, 200)


def test_wrong_values_are_named():
    with pytest.raises(ConfigError, match=r'hybrid.parts = 3: must divide model.head_dim = 8'):
        mechanisms.build(Hybrid(parts=3), DIMS)
    with pytest.raises(ConfigError, match=r'hybrid.approximation = .pade.'):
        Hybrid(approximation='pade')
    with pytest.raises(ConfigError, match=r'hybrid.window = 0'):
        Hybrid(window=0)
    with pytest.raises(ConfigError, match=r'hybrid.degree = 6, hybrid.parts = 1: make 1.3e\+08 sums of a head of 64, '):
        Hybrid(degree=6).build(HeadDims(2, 2, 64), nnx.Rngs(0))
