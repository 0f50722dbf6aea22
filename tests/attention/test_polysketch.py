"""Polysketch: its theorems in numbers, its factors, its range, and parameter counts."""

import math
import re

import jax
import jax.numpy as jnp
import mechanisms
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import print_saved_residuals
from mechanisms import DIMS

from lm.attention import HeadDims
from lm.attention.maps.sketch_moments import mean_weight_ratio
from lm.attention.maps.sketches import SKETCHES
from lm.attention.polynomial import Polynomial
from lm.attention.polysketch import Polysketch
from lm.errors import ConfigError
from lm.model import REMAT, ModelConfig, Transformer
from lm.ops.chunks import map_chunks


def test_one_block_with_a_norm_of_the_sketch_is_polynomial_attention():
    inputs = mechanisms.draw()
    module = mechanisms.build(Polysketch(sketch='gaussian', block=64, sketch_norm='tied'))
    polynomial = Polynomial(degree=4).build(DIMS, nnx.Rngs(0))
    polynomial.q_norm, polynomial.k_norm = module.q_norm, module.k_norm
    found, expected = (mechanisms.apply(m, *inputs) for m in (module, polynomial))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ('r', 'degree', 'sketches', 'offset'), [(16, 4, 1, 2.0), (8, 4, 3, 0.0), (16, 8, 1, 2.0), (8, 2, 1, 2.0)]
)
def test_the_mean_factor_makes_mean_weights_equal(r, degree, sketches, offset):
    """Simulated: many draws of sketches, for queries and keys in random directions."""
    size, config = (
        16,
        Polysketch(
            sketch='gaussian', sketch_size=r, degree=degree, sketches=sketches, offset=offset, far_factor='mean'
        ),
    )
    module = config.build(HeadDims(1, 1, size), nnx.Rngs(0))
    x, y = (np.asarray(jax.random.normal(jax.random.key(i), (1, 64, 1, size))) for i in range(2))
    x, y = module.normalize(jnp.asarray(x), jnp.asarray(y))
    exact = np.mean(mechanisms.scores(np.asarray(x, np.float64), np.asarray(y, np.float64)) ** degree)

    def one(key):
        drawn = config.build(HeadDims(1, 1, size), nnx.Rngs(params=0, projections=key))
        q, k = drawn.sketched(x, y).sketches
        return jnp.mean(jnp.einsum('blhr,bmhr->blm', q, k) ** 2)

    far = np.asarray(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(1), 3000)), np.float64)
    assert far.mean() == pytest.approx(exact, rel=0.12)


def test_mean_factors_of_heads_of_64():
    """Measured from outside in float64: an unrelated key weighs 88, 44 and 22 times its exact weight without an
    offset. These are medians of a few draws; the formula is within a tenth."""
    ratios = [mean_weight_ratio(64, r, 2) for r in (16, 32, 64)]
    np.testing.assert_allclose(ratios, [88, 44, 22], rtol=0.1)
    factors = [
        Polysketch(sketch='gaussian', sketch_size=r, far_factor='mean').factor(HeadDims(1, 1, 64)) for r in (16, 32, 64)
    ]
    np.testing.assert_allclose(factors, [0.054, 0.10, 0.19], rtol=0.04)
    assert mean_weight_ratio(64, 16, 2, 4, 2.0) == pytest.approx(mean_weight_ratio(64, 64, 2, 1, 2.0))


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(far_factor='median'), "far_factor = 'median': must be a number above 0, 'mean' or 'published'"),
        (dict(far_factor=0.0), 'far_factor = 0.0: must be above 0'),
        (dict(far_factor='mean'), "for polysketch.sketch = 'gaussian' alone; give a number"),
        (dict(sketch='srht', far_factor='published'), "for polysketch.sketch = 'gaussian' alone; give a number"),
    ],
)
def test_refused_factors(options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        Polysketch(**options)


def test_decoding_equals_the_parallel_form():
    module = mechanisms.build(Polysketch(sketch='learned', sketch_size=8, block=16))
    shapes = mechanisms.check_steps(module, mechanisms.draw())
    assert shapes.recent.v_BxSxKxD == (2, 16, DIMS.n_kv_heads, DIMS.head_dim)


def test_one_block_is_polynomial_attention():
    q, k, v = mechanisms.draw()
    polysketch, polynomial = mechanisms.build(Polysketch(block=64)), Polynomial(degree=4).build(DIMS, nnx.Rngs(0))
    polynomial.q_norm, polynomial.k_norm = polysketch.q_norm, polysketch.k_norm
    found, expected = (mechanisms.apply(module, q, k, v) for module in (polysketch, polynomial))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_near_and_far_weights_start_at_one_scale():
    """If exact weights were a thousand times larger than sketched weights, they would hide all tokens before
    a block."""
    dims = HeadDims(n_heads=2, n_kv_heads=1, head_dim=64)
    module = Polysketch(sketch_size=32, block=16).build(dims, nnx.Rngs(0))
    q, k = module.normalize(*mechanisms.draw(dims=dims)[:2])
    near, far = mechanisms.scores(q, k) ** 4, mechanisms.scores(*module.sketched(q, k).sketches) ** 2
    assert 1 < near.mean() / far.mean() < 50


@pytest.mark.parametrize(('local', 'implementation'), [(True, None), (False, None), (True, 'reference')])
def test_the_sixteenth_power_stays_in_range(local, implementation, monkeypatch):
    """Near and far weights stay in range. The scaling that keeps them there changes no bit of values that were in
    range."""
    dims = HeadDims(n_heads=2, n_kv_heads=1, head_dim=64)
    config = Polysketch(
        sketch='gaussian', sketch_size=4, degree=16, local=local, block=8, implementation=implementation
    )
    module = config.build(dims, nnx.Rngs(0, projections=1))
    q, k, v = mechanisms.draw(dims=dims)
    found = module(q, k, v)
    with monkeypatch.context() as patched:
        patched.setattr('lm.attention.polysketch.score_scale', lambda degree, head_dim: 1.0)
        np.testing.assert_array_equal(found, module(q, k, v))
    for norm in (module.q_norm, module.k_norm):
        norm.scale[...] = jnp.full((64,), 2.1)
    k = k.at[:, 0].set(q[:, 0, :1])
    o, gradients = jax.value_and_grad(lambda *x: jnp.square(module(*x)).sum(), (0, 1, 2))(q, k, v)
    assert np.isfinite(o)
    assert all(np.isfinite(g).all() for g in gradients)


def test_one_block_of_the_sixteenth_power_is_polynomial_attention():
    dims = HeadDims(n_heads=2, n_kv_heads=1, head_dim=64)
    q, k, v = mechanisms.draw(dims=dims)
    k = k.at[:, 0].set(q[:, 0, :1])
    modules = [config.build(dims, nnx.Rngs(0)) for config in (Polysketch(degree=16), Polynomial(degree=16))]
    for module in modules:
        module.q_norm.scale[...] = module.k_norm.scale[...] = jnp.full((64,), 2.1)
    found, expected = (module(q, k, v) for module in modules)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert np.isfinite(expected).all()


def test_a_single_block_runs_the_requested_implementation(monkeypatch):
    asked = []
    monkeypatch.setattr(
        'lm.attention.polysketch.polynomial_attention', lambda q, k, v, **options: asked.append(options) or v
    )
    for name in (None, 'reference', 'pallas_gpu'):
        mechanisms.build(Polysketch(implementation=name))(*mechanisms.draw())
    assert [options['implementation'] for options in asked] == [None, 'reference', 'pallas_gpu']
    q, k, v = mechanisms.draw()
    mechanisms.build(Polysketch(implementation='pallas_tpu', gate=True))(q, k, v, jnp.zeros(k.shape[:3]))
    assert asked[-1]['implementation'] is None, 'its kernels of one block know no decay'


def test_chunks_change_nothing():
    x = jax.random.normal(jax.random.key(0), (2, 45, 1, 3, 16))
    graph, state = nnx.split(SKETCHES['learned'](1, 16, 8, 2, 8, nnx.Rngs(0)))

    def loss(state, x, chunk):
        return jnp.sin(map_chunks(lambda s, x: nnx.merge(graph, s)(x), state, x, chunk)).sum()

    got, expected = (jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)(state, x, chunk) for chunk in (16, 45))
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=1e-4, atol=1e-5), got, expected)


@pytest.mark.parametrize('name', ['gaussian', 'srht'])
def test_random_sketches_keep_no_products(name, capsys):
    """`model.remat = 'dots'` would save the products: they are float32, and larger than the vectors that they come
    from."""
    x = jax.random.normal(jax.random.key(0), (2, 45, 1, 3, 16), jnp.bfloat16)
    sketch = SKETCHES[name](1, 16, 8, 4, 8, nnx.Rngs(0))

    def loss(x):
        return jnp.sin(sketch.of_each(x).sketches[0].astype(jnp.float32)).sum()

    kept = jax.checkpoint(loss, policy=REMAT['dots'])
    print_saved_residuals(kept, x)
    found = re.findall(r'^(\w+)\[([\d,]+)\]', capsys.readouterr().out, re.MULTILINE)
    large = {(dtype, math.prod(map(int, shape.split(',')))) for dtype, shape in found}
    vectors, sketches = (
        ('bf16', 2 * 45 * 3 * 16),
        ('u16', 2 * 45 * 3 * 8),
    )  # named values are saved as bits
    assert {pair for pair in large if pair[1] >= 2 * 45 * 3 * 8} == {vectors, sketches}
    found, *others = (
        np.asarray(jax.grad(function)(x), np.float32)
        for function in (loss, kept, lambda x: jnp.sin(sketch(x).astype(jnp.float32)).sum())
    )
    for other in others:
        np.testing.assert_allclose(other, found, rtol=0, atol=1e-2 * np.abs(found).max())


def kernels(name, size, r, power, x, y, draws):
    """Computes ⟨ψ(x), ψ(y)⟩ of many independent sketches, [draws, X, Y]."""

    def one(key):
        sketch = SKETCHES[name](1, size, r, power, 8, nnx.Rngs(params=key, projections=key))
        return jnp.einsum('xr,yr->xy', *(sketch(a[None, :, None, None])[0, :, 0, 0] for a in (x, y)))

    return np.asarray(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(1), draws)), np.float64)


@pytest.mark.parametrize('name', ['gaussian', 'srht'])
def test_theorems_of_random_sketches(name):
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(12, 16)).astype(np.float32) for _ in range(2))
    exact = (np.asarray(x, np.float64) @ y.T) ** 2
    size = np.linalg.norm(x, axis=1)[:, None] ** 2 * np.linalg.norm(y, axis=1) ** 2

    # The sketch is unbiased: the mean of many sketches converges to the kernel of degree P.
    many = kernels(name, 16, 32, 2, x, y, 2000)
    assert np.linalg.norm(many.mean(0) - exact) < 0.03 * np.linalg.norm(size)

    # Theorem 1.1: the error of the squares, relative to Σ ‖x‖^2p ‖y‖^2p, falls like 1/√r; no weight is negative.
    errors = []
    for r in (16, 64, 256):
        weights = kernels(name, 16, r, 2, x, y, 200) ** 2
        assert (weights >= 0).all()
        errors.append(np.sqrt(np.mean((weights - exact**2) ** 2)) / np.sqrt(np.mean(size**4)))
    assert errors[0] > errors[1] > errors[2]
    assert 2.5 < errors[0] / errors[2] < 12  # √16 = 4; the term of the square falls faster
    assert errors[2] < 0.15


def test_higher_powers_are_unbiased():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6, 8)).astype(np.float32) / np.sqrt(8)
    many = kernels('gaussian', 8, 32, 4, x, x, 20_000)
    exact = (np.asarray(x, np.float64) @ x.T) ** 4
    assert np.linalg.norm(many.mean(0) - exact) < 0.1 * np.linalg.norm(exact)


def test_projections_are_never_trained():
    module = Polysketch(sketch='gaussian').build(DIMS, nnx.Rngs(0))
    names = [str(path) for path, _ in nnx.state(module, nnx.Param).flat_state()]
    assert names
    assert all('norm' in name for name in names)


def count(attention, **shape):
    model = nnx.eval_shape(lambda: Transformer(ModelConfig(attention=attention, **shape), nnx.Rngs(0)))
    return sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


SMALL, MEDIUM, LARGE = dict(), dict(d_model=1024, n_heads=16), dict(d_model=1280, n_heads=20)


@pytest.mark.parametrize(
    ('shape', 'layers', 'sketch', 'r', 'millions'),
    [
        (SMALL, 12, 'learned', 64, 113),
        (SMALL, 12, 'learned', 32, 111),
        (SMALL, 13, 'learned', 64, 120),
        (SMALL, 13, 'learned', 32, 118),
        (SMALL, 13, 'gaussian', 32, 117),
        (MEDIUM, 24, 'learned', 64, 341),
        (MEDIUM, 24, 'learned', 32, 337),
        (MEDIUM, 26, 'learned', 64, 367),
        (MEDIUM, 26, 'learned', 32, 362),
        (LARGE, 39, 'learned', 64, 817),
        (LARGE, 39, 'learned', 32, 811),
    ],
)
def test_parameter_counts_of_appendix_h(shape, layers, sketch, r, millions):
    found = count(Polysketch(sketch=sketch, sketch_size=r), n_layers=layers, **shape)
    assert found == pytest.approx(millions * 1e6, rel=0.01)


def test_flops():
    config = Polysketch(sketch_size=32)
    exact = Polynomial().flops_per_token(DIMS, 1024)
    assert config.flops_per_token(DIMS, 1024) == pytest.approx(exact, rel=0.01)
    assert config.flops_per_token(DIMS, 2**22) == pytest.approx(config.flops_per_token(DIMS, 2**24), rel=1e-3)
    networks = 2 * (8 * 16 * 32 + 24 * 32**2) * 2
    without = Polysketch(sketch_size=32, sketch='gaussian').flops_per_token(DIMS, 8192) - 2 * 2 * 16 * 32 * 6
    assert config.flops_per_token(DIMS, 8192) - without == pytest.approx(networks * 6)
    narrow = Polysketch(sketch_size=32, network_width=4)
    assert narrow.flops_per_token(DIMS, 8192) - without == pytest.approx(networks / 2 * 6)


def test_networks_of_another_width():
    shapes = [p.shape for p in jax.tree.leaves(nnx.state(mechanisms.build(Polysketch(sketch_size=8, network_width=3))))]
    assert {(1, 16, 24), (1, 24, 8), (1, 8, 24)} <= set(shapes)
    assert not [shape for shape in shapes if 64 in shape]


@pytest.mark.parametrize('degree', [3, 6, 32])
def test_degree_is_a_power_of_two(degree):
    with pytest.raises(ConfigError, match='degree'):
        Polysketch(degree=degree)
