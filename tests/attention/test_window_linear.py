"""Window and recurrence in one layer against the formula of LoLCATs, eq. 7, with several feature maps."""

import jax
import jax.numpy as jnp
import mechanisms
import numpy as np
import pytest
from flax import nnx

from lm.attention import HeadDims
from lm.attention.hedgehog import Hedgehog
from lm.attention.performer import Performer
from lm.attention.polysketch import Polysketch
from lm.attention.softmax import Softmax
from lm.attention.taylor import Taylor
from lm.attention.window_linear import WindowLinear
from lm.errors import ConfigError
from lm.ops.linear_attention import LinearCall, compute

DIMS = HeadDims(n_heads=2, n_kv_heads=1, head_dim=8)


def two_sided(weight, x):
    """Returns [softmax(W x), softmax(-W x)] with W of each head: [B, L, N, 2 D]."""
    wx = np.einsum('nre,blne->blnr', weight, x)
    both = [np.exp(s - s.max(-1, keepdims=True)) for s in (wx, -wx)]
    return np.concatenate([s / s.sum(-1, keepdims=True) for s in both], -1)


def reference(config, arrays, q, k, v):
    """Computes LoLCATs, eq. 7, with Hedgehog's features."""
    names = ('map/q_weight', 'map/k_weight') if config.map else ('q_weight', 'k_weight')
    older = mechanisms.scores(*(two_sided(arrays[name], x) for name, x in zip(names, (q, k), strict=True)))
    distance = np.arange(q.shape[1])[:, None] - np.arange(q.shape[1])
    inside = (distance >= 0) & (distance < config.window)
    s = np.where(inside, mechanisms.scores(q, k) * (config.scale or q.shape[-1] ** -0.5), -np.inf)
    gamma = 1 / (1 + np.exp(-arrays['mix_logit']))[:, None, None]
    return mechanisms.mix(np.where(inside, gamma * np.exp(s - s.max(-1, keepdims=True)), older), v)


CONFIGS = [WindowLinear(window=8), WindowLinear(window=5, scale=0.7, mix=0.5), WindowLinear(map=Hedgehog(), window=3)]


@pytest.mark.parametrize('config', CONFIGS, ids=str)
def test_agrees_with_the_formula(config):
    module = mechanisms.build(config, DIMS)
    mechanisms.check_values(module, reference, mechanisms.draw(dims=DIMS))
    mechanisms.check_gradients(module, reference, mechanisms.draw(dims=DIMS))


def test_steps_equal_the_whole():
    shapes = mechanisms.check_steps(mechanisms.build(CONFIGS[0], DIMS), mechanisms.draw(dims=DIMS))
    assert shapes.recent.k_BxSxKxE == (2, 8, 1, 8)


@pytest.mark.parametrize(
    'inner', [Performer(n_features=16), Polysketch(sketch_size=8, sketch='gaussian', local=False)], ids=str
)
def test_other_maps_decode_and_agree_with_the_operation_as_its_formulas_read(inner):
    module, arrays = mechanisms.build(WindowLinear(map=inner, window=6), DIMS), mechanisms.draw(dims=DIMS)
    mechanisms.check_steps(module, arrays)
    call = module.make_call(*arrays)
    assert isinstance(call, LinearCall)
    np.testing.assert_allclose(mechanisms.apply(module, *arrays), compute(call, 'reference').o_BxLxHxD, atol=1e-5)


def test_the_factor_multiplies_the_weights_of_the_window_for_every_power():
    """With sketches, whose features are squared, γ → 0 leaves the older keys alone."""
    inner = Polysketch(sketch_size=8, sketch='gaussian', local=False)
    module, (q, k, v) = mechanisms.build(WindowLinear(map=inner, window=1), DIMS), mechanisms.draw(dims=DIMS)
    found = []
    for logit in (0.0, 20.0):
        module.mix_logit[...] = jnp.full(2, logit)
        found.append(mechanisms.apply(module, q, k, v)[:, 1])
    # The second token weighs its own value by γ and the first value by a: o = (γ v_1 + a v_0) / (γ + a).
    first, own = (np.repeat(np.asarray(v[:, i], np.float64), 2, axis=1) for i in (0, 1))
    half, whole = (np.asarray(o, np.float64) for o in found)
    ratios = [np.sum((own - o) * (own - first), -1) / np.sum((o - first) * (own - first), -1) for o in (half, whole)]
    np.testing.assert_allclose(ratios[0], 2 * ratios[1], rtol=1e-3)


def test_a_window_over_all_keys_is_softmax():
    q, k, v = mechanisms.draw(dims=DIMS, size=3.0)
    exact = mechanisms.apply(Softmax().build(DIMS, nnx.Rngs(0)), q, k, v)
    found = mechanisms.apply(mechanisms.build(WindowLinear(window=45), DIMS), q, k, v)
    np.testing.assert_allclose(found, exact, atol=1e-5)


def test_no_leak():
    mechanisms.check_no_leak(mechanisms.build(CONFIGS[0], DIMS), mechanisms.draw(dims=DIMS))


@pytest.mark.parametrize('size', [1e-3, 30.0])
def test_large_and_small_scores_stay_finite(size):
    module, arrays = mechanisms.build(CONFIGS[0], DIMS), mechanisms.draw(dims=DIMS, size=size)
    o, gradients = jax.jit(jax.value_and_grad(lambda *x: jnp.sum(module(*x) ** 2), (0, 1, 2)))(*arrays)
    assert np.isfinite(o)
    assert all(np.isfinite(g).all() for g in gradients)


def test_it_starts_with_the_factor_of_the_authors():
    module = WindowLinear().build(DIMS, nnx.Rngs(0))
    np.testing.assert_allclose(module.mix_logit[...], [-2.1972246] * 2, rtol=1e-6)


def test_other_maps_are_not_exported_to_transformers():
    assert WindowLinear().portable(DIMS).keys() == {'map', 'window', 'mix', 'scale', 'far_factor'}
    with pytest.raises(ConfigError, match=r'window_linear.map = @hedgehog\(\).*--format safetensors'):
        WindowLinear(map=Hedgehog()).portable(DIMS)


@pytest.mark.parametrize(
    ('inner', 'message'),
    [
        (Polysketch(sketch_size=8), 'polysketch.*local = False'),
        (Hedgehog(qk_norm=True), 'hedgehog.*set window_linear.qk_norm'),
        (Performer(n_features=16, causal=False), 'performer.*causal = True'),
        (Polysketch(sketch_size=8, local=False, gate=True), 'polysketch.*gate = False'),
    ],
)
def test_maps_that_do_not_fit_are_named(inner, message):
    with pytest.raises(ConfigError, match=message):
        WindowLinear(map=inner).build(DIMS, nnx.Rngs(0))
