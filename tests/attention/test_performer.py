"""Performer: its features, and the statistics and the numeric range of its estimators."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import mechanisms
import numpy as np
import pytest
from flax import nnx

from lm.attention.maps.projections import PROJECTIONS
from lm.attention.maps.random_features import FEATURES, GENERALIZED_FEATURES, SOFTMAX_FEATURES, Projection
from lm.attention.performer import Performer
from lm.attention.softmax import Softmax
from lm.errors import ConfigError
from lm.model import ModelConfig, Transformer

SMALL = {name: Performer(features=name, n_features=32, block=16) for name in FEATURES}


def inputs(name, **options):
    """Returns vectors whose weights do not cancel in the denominator; no finite precision survives cancellation."""
    signed = FEATURES[name].signed
    return mechanisms.draw(size=0.3 if signed else 1.0, shift=0.5 if signed else 0.0, **options)


@pytest.mark.parametrize('name', FEATURES)
def test_features_agree_with_the_formula(name):
    """The test compares values and gradients of φ for queries and for keys."""
    config = dataclasses.replace(SMALL[name], renormalize=name not in ('trigonometric', 'random_phases'))
    module = mechanisms.build(config)
    parameters = Projection(module.projection[...], None if module.phases is None else module.phases[...])
    x, formula = inputs(name)[0], mechanisms.make_formula(config, module.dims, np, mechanisms.arrays(module))
    wide = np.asarray(x, np.float64)
    for query in (True, False):
        exact = lambda x, query=query: formula.map(x, query and config.renormalize)  # noqa: E731
        expected = exact(wide)
        found, pull = jax.vjp(lambda x, query=query: module.feature_map(parameters, x, query), x)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
        rng = np.random.default_rng(0)
        cotangent, direction = rng.normal(size=expected.shape), 1e-6 * rng.normal(size=x.shape)
        if query and config.stabilizer and name in ('positive', 'hyperbolic'):
            continue  # the divisor of a query's features cancels in the attention, so it has no gradient
        difference = np.sum(cotangent * (exact(wide + direction) - exact(wide - direction))) / 2
        np.testing.assert_allclose(np.sum(pull(jnp.float32(cotangent))[0] * direction), difference, rtol=1e-4)


def test_sums_of_signed_weights_near_zero_move_by_twice_the_stabilizer():
    """About half of the sums are within the stabilizer of zero; the others stay as they are."""
    inputs, module = mechanisms.draw(length=6), mechanisms.build(Performer(features='tanh', n_features=32))
    q, k, v = (np.asarray(x, np.float64) for x in inputs)
    formula = mechanisms.make_formula(module.config, module.dims, np, mechanisms.arrays(module))
    weights = formula.weights(q, k) * np.tril(np.ones((6, 6)))
    total = weights.sum(-1).swapaxes(1, 2)[..., None]
    sizes = np.sort(np.abs(total), axis=None)
    epsilon = sizes[sizes.size // 2 :][:2].mean()  # between two sums, so that rounding moves none across
    near = np.abs(total) <= epsilon
    assert 0 < near.sum() < near.size
    expected = mechanisms.mix_values(weights, v) / (total + 2 * epsilon * near)
    found = mechanisms.build(dataclasses.replace(module.config, stabilizer=epsilon))(*inputs)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize('length', [1, 33])
def test_the_block_changes_nothing(length):
    qkv = inputs('positive', length=length)
    configs = [Performer(n_features=32, block=block, stabilizer=1e-9) for block in (7, 1024, None)]
    outputs = [mechanisms.apply(mechanisms.build(config), *qkv) for config in configs]
    for other in outputs[1:]:
        np.testing.assert_allclose(other, outputs[0], atol=1e-5 * float(jnp.abs(outputs[0]).max()))


@pytest.mark.parametrize('name', ['positive', 'exp'])
def test_long_vectors_stay_finite(name):
    module = mechanisms.build(dataclasses.replace(SMALL[name], n_features=256))
    both = jax.jit(jax.value_and_grad(lambda *x: jnp.sum(module(*x)), (0, 1, 2)))
    for size in (30.0, 300.0, 3e4):
        q, k, v = mechanisms.draw(size=size)
        # These keys point where a feature is largest.
        k = k.at[:, ::3].set(module.projection[7][None, None, None] * 2)
        o, gradients = both(q, k, v)
        assert np.isfinite(o)
        assert all(np.isfinite(g).all() for g in gradients)


def estimates(name, projection, n_draws, n_features=32):
    """Returns [n_draws, pairs] estimates of the softmax kernel, divided by its values."""
    feature_map = Performer(features=name, stabilizer=0.0, renormalize=False).feature_map(16)
    q, k = 0.4 * jax.random.normal(jax.random.key(1), (2, 1, 6, 1, 16))

    def one(key):
        rows = n_features // feature_map.per_row
        w = PROJECTIONS[projection](key, rows, 16)
        phases = jax.random.uniform(jax.random.fold_in(key, 1), (rows,), maxval=2 * math.pi)
        phi_q, phi_k = (feature_map(Projection(w, phases), x, x is q) for x in (q, k))
        return jnp.einsum('btnm,bsnm->ts', phi_q, phi_k)

    found = jax.jit(lambda keys: jax.lax.map(one, keys, batch_size=500))(jax.random.split(jax.random.key(2), n_draws))
    return np.asarray(found, np.float64) / np.exp(np.einsum('btnd,bsnd->ts', q, k) / 4)


@pytest.mark.parametrize('name', SOFTMAX_FEATURES)
def test_estimators_are_unbiased_and_orthogonal_rows_better(name):
    """Seed, §2.3 and §2.4: E⟨φ(q), φ(k)⟩ is the kernel; H-ORF and G-ORF have a small bias."""
    error = {}
    for projection in PROJECTIONS:
        found = estimates(name, projection, 2000)
        error[projection] = ((found - 1) ** 2).mean()
        if projection in ('iid', 'orthogonal'):
            standard_errors = (found.mean(0) - 1) / (found.std(0) / math.sqrt(len(found)))
            assert np.abs(standard_errors).max() < 4.5  # over 36 pairs
        assert np.abs(found.mean(0) - 1).mean() < 0.07
    assert error['orthogonal'] < 0.95 * error['iid']
    assert error['hadamard'] < 0.95 * error['iid']
    assert error['givens'] < 0.95 * error['iid']


def test_errors_fall_with_the_features_and_hyperbolic_is_better():
    options = (('positive', 32), ('positive', 512), ('hyperbolic', 512))
    mse = [((estimates(name, 'iid', 2000, n) - 1) ** 2).mean() for name, n in options]
    assert 13 < mse[0] / mse[1] < 19  # with 16 times the features
    assert mse[2] < 0.9 * mse[1]


def test_many_features_approach_softmax():
    config = Performer(n_features=4096)
    q, k, v = mechanisms.draw(size=0.5)
    exact = mechanisms.compute(mechanisms.build(Softmax()), {}, q, k, v)
    module = mechanisms.build(config)
    assert np.linalg.norm(mechanisms.apply(module, q, k, v) - exact) < 0.05 * np.linalg.norm(exact)


@pytest.mark.parametrize('size', [16, 12])
@pytest.mark.parametrize('name', PROJECTIONS)
def test_projections(name, size):
    draw = jax.jit(lambda key: PROJECTIONS[name](key, 40, size))
    many = np.stack([draw(jax.random.key(i)) for i in range(300)])
    assert many.shape[1:] == (40, size)
    assert np.abs(many.mean(0)).max() < 0.3
    np.testing.assert_allclose((many**2).sum(-1).mean(), size, rtol=0.02)
    if name in ('orthogonal', 'givens') or (name == 'hadamard' and size == 16):
        gram = np.einsum('nrd,nsd->nrs', many[:, :size], many[:, :size])
        off = gram * (1 - np.eye(size))
        assert np.abs(off).max() < 1e-3


def test_features_without_signs_give_no_negative_weight():
    q, k, _ = mechanisms.draw(1, 16, size=2.0)
    v = jnp.broadcast_to(jnp.eye(16)[None, :, None], (1, 16, 2, 16))
    for name in ('positive', 'relu'):
        weights = np.asarray(mechanisms.apply(mechanisms.build(SMALL[name]), q, k, v))
        assert weights.min() >= 0, name
        np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    for name, feature_map in FEATURES.items():
        module = mechanisms.build(SMALL[name])
        parameters = Projection(module.projection[...], None if module.phases is None else module.phases[...])
        assert (float(module.feature_map(parameters, q, False).min()) < 0) == feature_map.signed, name


def test_redraw():
    qkv = inputs('random_phases')
    module = mechanisms.build(dataclasses.replace(SMALL['random_phases'], redraw_every=10))
    first = {'projection': module.projection[...], 'phases': module.phases[...]}
    before = mechanisms.apply(module, *qkv)
    module.redraw(jax.random.key(5))
    drawn = mechanisms.apply(module, *qkv)
    module.redraw(jax.random.key(6))
    assert not np.allclose(mechanisms.apply(module, *qkv), drawn)
    module.redraw(jax.random.key(5))
    np.testing.assert_array_equal(mechanisms.apply(module, *qkv), drawn)
    assert not np.allclose(before, drawn)
    assert all(not np.allclose(getattr(module, name)[...], value) for name, value in first.items())
    fixed = mechanisms.build(SMALL['positive'])
    before = mechanisms.apply(fixed, *qkv)
    fixed.redraw(jax.random.key(5))
    np.testing.assert_array_equal(mechanisms.apply(fixed, *qkv), before)


def test_in_a_model():
    """Each layer draws its own projections, which are not parameters. Redrawing changes them all; no token sees the
    future."""
    config = ModelConfig(
        vocab_size=50, n_layers=2, d_model=16, n_heads=2, head_dim=8, attention=Performer(n_features=16, redraw_every=5)
    )
    model = Transformer(config, nnx.Rngs(params=0, projections=1))
    buffers = model.blocks[0].attention.projection[...]
    assert buffers.shape == (2, 16, 8)
    assert not np.allclose(buffers[0], buffers[1])
    assert all('projection' not in str(path) for path, _ in nnx.state(model, nnx.Param).flat_state())
    model.redraw((0,), jax.random.key(9))
    assert not np.isclose(model.blocks[0].attention.projection[...], buffers).any()
    tokens = jax.random.randint(jax.random.key(0), (1, 24), 0, 50)
    changed = tokens.at[0, 13].add(1) % 50
    before, after = (mechanisms.apply(model, one) for one in (tokens, changed))
    np.testing.assert_array_equal(before[:, :13], after[:, :13])


def test_cost_and_shapes():
    config = Performer()
    module = config.build(mechanisms.DIMS, nnx.Rngs(params=0, projections=1))
    assert module.projection.shape == (2048, 16)
    assert module.init_state(3, 100, jnp.float32).sums.kv_BxKxRxD.shape == (3, 2, 2048, 16)
    # Project to features; read (4 heads) and write (2) the sums and denominators, except in one block; compute the
    # weights in half a block, and mix the values.
    sums = 2 * 2048 * (16 * 6 + 4) * (1 - 1024 / 8192)
    assert config.flops_per_token(mechanisms.DIMS, 8192) == 2 * 2048 * 16 * 6 + sums + 4 * (2048 + 16) * 1024
    assert config.flops_per_token(mechanisms.DIMS, 512) == 2 * 2048 * 16 * 6 + 4 * (2048 + 16) * 512
    assert not GENERALIZED_FEATURES['relu'].signed


def test_wrong_values_are_named():
    for fields, guard in (('positive', 'stabilizer'), ('tanh', 'stabilizer'), ('relu', 'kernel_epsilon')):
        with pytest.raises(ConfigError, match=rf'performer.{guard} = 0.0: must be above 0'):
            Performer(features=fields, **{guard: 0.0})
        Performer(features=fields, **{guard: 0.0}, renormalize=False)
    with pytest.raises(ConfigError, match=r'performer.n_features = 7'):
        Performer(n_features=7)
    with pytest.raises(ConfigError, match=r'performer.features = .cosine.: must be one of positive'):
        Performer(features='cosine')
    with pytest.raises(ConfigError, match=r'performer.causal = False'):
        mechanisms.build(Performer(causal=False, n_features=8)).init_state(1, 8, jnp.float32)
