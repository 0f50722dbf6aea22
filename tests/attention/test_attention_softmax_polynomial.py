"""The exact mechanisms as modules: ranges, decoding, parameters, cost."""

import functools

import jax
import jax.numpy as jnp
import mechanisms
import numpy as np
import pytest
from flax import nnx
from mechanisms import DIMS

from lm.attention import HeadDims
from lm.attention.polynomial import Polynomial
from lm.attention.softmax import Softmax
from lm.errors import ConfigError
from lm.ops.exact_attention import polynomial_attention

build, draw = functools.partial(mechanisms.build, nudge=0.3), functools.partial(mechanisms.draw, size=2.0, shift=0.5)
CONFIGS = [
    Softmax(),
    Softmax(scale=0.5, window=7),
    Softmax(window=100),
    Softmax(sinks=True, log_base=3.0),
    Softmax(window=7, score_cap=2.0, log_base=100.0),
    Polynomial(),
    Polynomial(degree=2, denominator_bias=0.1),
]


@pytest.mark.parametrize('config', CONFIGS, ids=str)
def test_no_weight_is_negative_and_they_sum_to_at_most_one(config):
    """With unit vectors as values, the outputs are the weights."""
    module = build(config)
    q, k, _ = draw(1, 16)
    v = jnp.broadcast_to(jnp.eye(16)[None, :, None], (1, 16, 2, 16))
    weights = np.asarray(mechanisms.apply(module, q, k, v))
    assert weights.min() >= 0
    assert weights.sum(-1).max() < 1 + 1e-5
    assert np.median(weights.sum(-1)) > 0.9


def test_a_window_keeps_a_window():
    assert build(Softmax(window=7)).init_state(1, 1000, jnp.bfloat16).k_BxMxKxD.shape == (1, 7, 2, 16)
    assert build(Softmax(window=7)).init_state(1, 5, jnp.bfloat16).k_BxMxKxD.shape == (1, 5, 2, 16)
    assert build(Softmax()).init_state(1, 1000, jnp.bfloat16).v_BxMxKxD.dtype == jnp.bfloat16


def test_parameters():
    assert not jax.tree.leaves(nnx.state(build(Softmax())))
    sinks = Softmax(sinks=True).build(DIMS, nnx.Rngs(0)).sinks
    assert sinks is not None
    np.testing.assert_array_equal(sinks[...], np.zeros(4))
    shapes = jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(build(Polynomial()))))
    norm = {'scale': (16,), 'bias': (16,)}
    assert shapes == {'q_norm': norm, 'k_norm': norm}


def test_first_tokens_of_documents_have_plain_scores():
    """The factor counts the tokens of a document, not of the window, in decoding too."""
    module, (q, k, v) = build(Softmax(log_base=2.0)), draw(1, 20)
    starts = jnp.where(jnp.arange(20) < 8, 0, 8)[None]
    whole = module(q, k, v, starts_BxL=starts)
    alone = module(*(x[:, 8:] for x in (q, k, v)))
    np.testing.assert_allclose(whole[:, 8:], alone, atol=1e-5)
    state, outputs = module.init_state(1, 20, jnp.float32, documents=True), []
    for at in range(0, 20, 5):
        part = (x[:, at : at + 5] for x in (q, k, v))
        state, o = module.decode_step(state, *part, starts_BxT=starts[:, at : at + 5] - at)
        outputs.append(o)
    np.testing.assert_allclose(jnp.concatenate(outputs, 1), whole, atol=1e-5)


def test_gradients_reach_the_normalizations():
    module, (q, k, v) = build(Polynomial()), draw()
    gradients = nnx.grad(lambda m: (m(q, k, v) ** 2).sum())(module)
    assert all(np.abs(g).min() > 0 for g in jax.tree.leaves(gradients))


def test_first_scores_of_unrelated_vectors_have_the_configured_mean():
    dims = HeadDims(n_heads=2, n_kv_heads=1, head_dim=64)
    module = Polynomial(offset=3.0).build(dims, nnx.Rngs(0))
    q, k = (norm(numbers) for norm, numbers in zip((module.q_norm, module.k_norm), draw(dims=dims)[:2], strict=True))
    scores = np.einsum('blhd,bmkd->bhklm', q, k)
    assert scores.mean() == pytest.approx(3.0, abs=0.1)
    assert scores.std() == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(('offset', 'learned'), [(0.0, False), (2.0, True)])
def test_an_offset_is_learned_only_where_there_is_one(offset, learned):
    """Adding one number to all entries of a query changes no score while the keys' mean is zero. The same holds for
    keys."""
    module, (q, k, v) = Polynomial(offset=offset).build(DIMS, nnx.Rngs(0)), draw()
    gradients = nnx.grad(lambda m: (m(q, k, v) ** 2).sum())(module)
    for norm in (gradients.q_norm, gradients.k_norm):
        bias = np.asarray(norm.bias[...])
        assert (abs(bias.sum()) > 1e-3 * np.abs(bias).sum()) == learned


@pytest.mark.parametrize('gain', [1.0, 4.0])
def test_the_sixteenth_power_stays_in_range(gain):
    """Gains grow until scores reach 1,024, whose 16th power float32 cannot hold."""
    dims = HeadDims(n_heads=2, n_kv_heads=1, head_dim=64)
    module = Polynomial(degree=16, denominator_bias=0.5).build(dims, nnx.Rngs(0))
    for norm in (module.q_norm, module.k_norm):
        norm.scale[...] = jnp.full((64,), gain)
    q, k, v = draw(dims=dims)
    k = k.at[:, 0].set(q[:, 0, :1])  # the largest possible score
    o, gradients = jax.value_and_grad(lambda *x: jnp.square(module(*x)).sum(), (0, 1, 2))(q, k, v)
    assert np.isfinite(o)
    assert all(np.isfinite(g).all() for g in gradients)
    want = mechanisms.compute(module, mechanisms.arrays(module), q, k, v)
    np.testing.assert_allclose(module(q, k, v), want, atol=2e-4)


def test_the_sixteenth_power_of_wide_heads_vanishes_nowhere():
    """A first token without a similar key divides by the bias alone, and float32 must hold this bias."""
    dims = HeadDims(n_heads=2, n_kv_heads=1, head_dim=256)
    module = Polynomial(degree=16, offset=0.0).build(dims, nnx.Rngs(0))
    for norm in (module.q_norm, module.k_norm):
        norm.scale[...] = jnp.ones(256)
    q, k, v = draw(dims=dims)
    q = q.at[:, 0].set(jnp.tile(jnp.array([1.0, -1.0]), 128))
    k = k.at[:, 0].set(jnp.repeat(jnp.tile(jnp.array([1.0, -1.0]), 64), 2))
    o, gradients = jax.value_and_grad(lambda *x: jnp.square(module(*x)).sum(), (0, 1, 2))(q, k, v)
    assert np.isfinite(o)
    assert all(np.isfinite(g).all() for g in gradients)
    want = mechanisms.compute(module, mechanisms.arrays(module), q, k, v)
    np.testing.assert_allclose(module(q, k, v), want, atol=2e-4)


def test_a_large_power_has_the_same_weights_to_the_last_bit():
    module = Polynomial(degree=16, denominator_bias=0.5).build(DIMS, nnx.Rngs(0))
    q, k, v = draw()
    plain = polynomial_attention(*module.normalize(q, k), v, degree=16, denominator_bias=0.5)
    np.testing.assert_array_equal(module(q, k, v), plain)


def test_flops_per_token():
    # 4 heads of 16: each visible key costs 2·16 for the score and 2·16 for the value, and half of the keys are visible.
    assert Softmax().flops_per_token(DIMS, 1000) == 4 * (2 + 2) * 16 * 500
    assert Polynomial().flops_per_token(DIMS, 1000) == Softmax().flops_per_token(DIMS, 1000)
    assert Softmax(window=5000).flops_per_token(DIMS, 1000) == Softmax().flops_per_token(DIMS, 1000)
    seen = np.minimum(np.arange(1, 1001), 100).mean()
    assert Softmax(window=100).flops_per_token(DIMS, 1000) == pytest.approx(4 * 4 * 16 * seen, rel=1e-2)


@pytest.mark.parametrize(
    ('config', 'arguments', 'message'),
    [
        (Polynomial, {'degree': 3}, 'polynomial.degree = 3'),
        (Polynomial, {'degree': 0}, 'polynomial.degree = 0'),
        (Polynomial, {'denominator_bias': -1.0}, 'polynomial.denominator_bias = -1.0'),
        (Softmax, {'window': 0}, 'softmax.window = 0'),
        (Softmax, {'scale': -1.0}, 'softmax.scale = -1.0'),
        (Softmax, {'score_cap': 0.0}, 'softmax.score_cap = 0.0'),
        (Softmax, {'log_base': 1.0}, 'softmax.log_base = 1.0'),
    ],
)
def test_wrong_values_are_named(config, arguments, message):
    with pytest.raises(ConfigError, match=message):
        config(**arguments)
