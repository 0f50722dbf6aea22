"""LLoPS: its special cases."""

import jax
import jax.numpy as jnp
import mechanisms
import numpy as np
import pytest
from flax import nnx

from lm.attention import HeadDims
from lm.attention.llops import Llops, based_factors, based_size
from lm.attention.taylor import Taylor
from lm.errors import ConfigError
from lm.ops.powers import quotient

DIMS = HeadDims(n_heads=2, n_kv_heads=1, head_dim=8)


def test_first_scores_have_the_configured_offset():
    module = Llops(offset=2.0).build(HeadDims(n_heads=2, n_kv_heads=1, head_dim=64), nnx.Rngs(0))
    drawn = np.random.default_rng(0).standard_normal((2, 1000, 64)).astype(np.float32)
    scores = np.asarray(module.q_norm(drawn[0])) @ np.asarray(module.k_norm(drawn[1])).T
    assert scores.mean() / scores.std() == pytest.approx(2.0, abs=0.1)
    assert scores.std() == pytest.approx(8.0, abs=0.5)  # gains are 1


def test_weights_are_not_negative():
    """§3.2 squares the products."""
    module = mechanisms.build(Llops(n_features=16), HeadDims(4, 2, 16))
    q, k, _ = mechanisms.draw(1, 16)
    unit = jnp.broadcast_to(jnp.eye(16)[None, :, None], (1, 16, 2, 16))
    weights = np.asarray(mechanisms.apply(module, q, k, unit))
    assert weights.min() >= 0
    assert weights.sum(-1).max() <= 1 + 1e-5


@pytest.mark.parametrize(('degree', 'rank'), [(3, 1), (2, 3)])
def test_random_sketches_are_unbiased(degree, rank):
    """The mean of many sketches approaches (q·k)^p; their error falls like the root of the number of features."""
    q, k = jax.random.normal(jax.random.key(1), (2, 5, 8))
    exact = np.asarray(q @ k.T, np.float64) ** degree
    errors = []
    for n_features in (16, 256):
        config = Llops(degree=degree, rank=rank, n_features=n_features, nonnegative=False)
        sketch = config.sketch()

        def estimate(key, config=config, sketch=sketch):
            factors = config.init_factors(key, 8)
            return sketch(factors[0], q, True) @ sketch(factors[1], k, False).T

        found = np.asarray(jax.lax.map(estimate, jax.random.split(jax.random.key(2), 1500), batch_size=300), np.float64)
        assert np.abs((found.mean(0) - exact) / (found.std(0) / 1500**0.5)).max() < 4.5
        errors.append(np.sqrt(((found - exact) ** 2).mean()))
    assert 3 < errors[0] / errors[1] < 5.5


def test_flatten_is_an_element_wise_power():
    """§3.3: equal Θ_j make φ(x) = (Θ x)^p."""
    config = Llops(degree=3, nonnegative=False, init='flatten', n_features=10)
    factors, _ = config.init_factors(jax.random.key(0), 8)
    x = np.random.default_rng(0).normal(size=(4, 8))
    np.testing.assert_allclose(
        config.sketch()(factors, jnp.float32(x), True), (x @ np.asarray(factors[0, 0], np.float64)) ** 3, rtol=1e-4
    )


@pytest.mark.parametrize(('n_features', 'rank', 'degree'), [(153, 1, 2), (156, 2, 2), (156, 1, 4)])
def test_the_based_initialization_equals_based(n_features, rank, degree):
    """§3.3: with BASED's W the outputs equal Taylor attention. Additional features and factors change nothing at first,
    but learn."""
    dims = HeadDims(4, 2, 32)
    inputs = mechanisms.draw(dims=dims)
    taylor = Taylor(per_head=False).build(dims, nnx.Rngs(0))
    config = Llops(
        degree=degree, nonnegative=False, affine=True, init='based', denominator_bias=0.0, layer_norm=False,
        n_features=n_features, rank=rank,
    )  # fmt: skip
    module = config.build(dims, nnx.Rngs(1))
    spare = jax.random.normal(jax.random.key(0), module.q_factors.shape)
    for name, weight in (('q', taylor.q_weight[...][0]), ('k', taylor.k_weight[...][0])):
        getattr(module, f'{name}_factors')[...] = based_factors(config, weight, spare, queries=name == 'q')
    expected = mechanisms.apply(taylor, *inputs)
    np.testing.assert_allclose(mechanisms.apply(module, *inputs), expected, atol=2e-5 * float(jnp.abs(expected).max()))
    gradients = nnx.jit(nnx.grad(lambda m: (m(*inputs) ** 2).sum()))(module)
    assert float(jnp.abs(gradients.q_factors[...]).max(axis=(0, 2)).min()) > 0
    assert float(jnp.abs(gradients.q_factors[...]).max(axis=(1, 2, 3)).min()) > 0


def test_based_sizes():
    assert based_size(16 * 17 // 2, affine=False) == 16
    assert based_size(16 * 17 // 2 + 17, affine=True) == 16
    assert based_size(256, affine=True) == 21
    factors = Llops(degree=2, nonnegative=False, init='based', n_features=10).init_factors(jax.random.key(0), 8)
    assert factors[0].shape == (2, 1, 8, 10)
    # Without the lower powers, the kernel is s²/2.
    q, k = jax.random.normal(jax.random.key(1), (2, 5, 8))
    w_q, w_k = (jax.random.normal(jax.random.key(i), (8, 4)) for i in (2, 3))
    config = Llops(degree=2, nonnegative=False, init='based', n_features=10)
    phi = [
        config.sketch()(based_factors(config, w, factors[0], queries=True), x, True) for w, x in ((w_q, q), (w_k, k))
    ]
    np.testing.assert_allclose(phi[0] @ phi[1].T, ((q @ w_q) @ (k @ w_k).T / 2) ** 2 / 2, rtol=1e-4, atol=1e-5)


def test_parameters_and_cost():
    dims = HeadDims(12, 12, 64)
    module = Llops().build(dims, nnx.Rngs(0))
    assert module.q_factors.shape == module.k_factors.shape == (2, 1, 64, 256)
    assert Llops(affine=True, nonnegative=False, rank=2).build(dims, nnx.Rngs(0)).q_factors.shape == (4, 2, 65, 256)
    products, sums = 2 * 2 * 64 * 256 * 24, 2 * 256 * (64 * 24 + 12) * (1 - 128 / 8192)
    assert Llops().flops_per_token(dims, 8192) == products + sums + 12 * (256 + 64) * 128


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (dict(offset=1.0, layer_norm=False), 'llops.offset = 1.0: is of biases'),
        ({'degree': 3}, 'llops.degree = 3: must be even'),
        ({'offset': 1.0, 'layer_norm': False}, 'llops.offset = 1.0: is of biases'),
        ({'init': 'based'}, "llops.init = 'based': "),
        (
            {'init': 'based', 'nonnegative': False},
            "llops.init = 'based': BASED's map has degree 2, and llops.degree = 4",
        ),
        ({'denominator_bias': 0.0}, 'llops.denominator_bias = 0.0: must be above 0'),
        ({'layer_norm': False, 'degree': 8}, 'llops.layer_norm = False: products of llops.degree = 8 unnorm'),
        ({'init': 'zeros'}, "llops.init = 'zeros': must be one of"),
    ],
)
def test_wrong_values_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Llops(**arguments)


def test_gradients_of_large_signed_denominators():
    """Float32 cannot hold the squares of denominators beyond 1.8e19; gradients must still agree with float64."""
    dims = HeadDims(n_heads=2, n_kv_heads=1, head_dim=32)
    module = mechanisms.build(Llops(degree=16, nonnegative=False, n_features=64), dims)
    mechanisms.check_gradients(module, mechanisms.draw(dims=dims), tolerance=1e-3)


def test_the_map_of_based_refuses_too_few_features():
    with pytest.raises(ConfigError, match='n_features = 2: too few'):
        Llops(degree=2, nonnegative=False, n_features=2, affine=True, init='based')


def test_derivatives_of_a_quotient_stay_finite():
    o, total = jnp.float32(3e25), jnp.float32(1e25)
    by_o, by_total = jax.grad(quotient, (0, 1))(o, total)
    np.testing.assert_allclose([by_o, by_total], [1e-25, -3e-25], rtol=1e-6)
