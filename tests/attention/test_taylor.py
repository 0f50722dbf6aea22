"""Taylor attention: its series, its state, and BASED as a pattern of layers."""

import jax
import jax.numpy as jnp
import mechanisms
import numpy as np
import pytest
from flax import nnx

from lm.attention import HeadDims
from lm.attention.softmax import Softmax
from lm.attention.taylor import Taylor
from lm.errors import ConfigError
from lm.model import ModelConfig, Transformer


def test_the_features_are_the_series():
    """⟨φ(x), φ(y)⟩ = 1 + s + s²/2 for φ(x) = [1, x, (x ⊗ x) / √2] of compressed vectors."""
    x, y = (np.asarray(z, np.float64)[0, :, 0] / 2 for z in mechanisms.draw()[:2])

    def phi(x):
        pairs = np.einsum('ta,tb->tab', x, x).reshape(len(x), -1) / 2**0.5
        return np.concatenate([np.ones((len(x), 1)), x, pairs], axis=1)

    expected = np.tril(phi(x) @ phi(y).T)
    q, k = (jnp.asarray(2 * z, jnp.float32)[None, :, None] for z in (x, y))
    module = mechanisms.build(Taylor(feature_dim=None), HeadDims(1, 1, 16))
    values = jnp.eye(45)[None, :, None, :16]
    expected = (expected / expected.sum(-1, keepdims=True))[:, :16]
    np.testing.assert_allclose(mechanisms.apply(module, q, k, values)[0, :, 0], expected, atol=1e-6)


def test_weights_are_positive():
    module = mechanisms.build(Taylor(), HeadDims(4, 2, 16))
    q, k, _ = mechanisms.draw(1, 16, size=5.0)
    unit = jnp.broadcast_to(jnp.eye(16)[None, :, None], (1, 16, 2, 16))
    weights = np.asarray(mechanisms.apply(module, q, k, unit))
    assert weights.min() >= 0
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)


def test_parameters_and_state():
    dims = HeadDims(4, 2, 64)
    shapes = lambda config: jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(config.build(dims, nnx.Rngs(0)))))  # noqa: E731
    assert shapes(Taylor()) == {'q_weight': (4, 64, 16), 'k_weight': (2, 64, 16)}
    assert shapes(Taylor(per_head=False)) == {'q_weight': (1, 64, 16), 'k_weight': (1, 64, 16)}
    assert shapes(Taylor(feature_dim=None)) == {}
    module = Taylor().build(dims, nnx.Rngs(0))
    state = module.init_state(1, 10**9, jnp.bfloat16)
    # 1 + 16 + 16·17/2 products are distinct. Packing in strips of eight rows keeps some of them twice, but not all 273.
    assert 153 <= state.sums.kv_BxKxRxD.shape[2] < 273
    assert jnp.std(module.q_weight[...]) == pytest.approx(1 / 8, rel=0.1)


def test_based_is_a_pattern_of_layers():
    """Taylor layers alternate with windows. Together they see every earlier token, and no later one."""
    config = ModelConfig(
        vocab_size=50, n_layers=2, d_model=16, n_heads=2, head_dim=8, attention=[Taylor(), Softmax(window=4)]
    )
    model = Transformer(config, nnx.Rngs(params=0, projections=1))
    tokens = jax.random.randint(jax.random.key(0), (1, 24), 0, 50)
    changed = tokens.at[0, 13].add(1) % 50
    before, after = (mechanisms.apply(model, one) for one in (tokens, changed))
    np.testing.assert_array_equal(before[:, :13], after[:, :13])
    assert not np.allclose(before[:, -1], after[:, -1])
    state, outputs = model.init_state(1, 24), []
    for part in (11, 1, 11, 1):
        at = sum(o.shape[1] for o in outputs)
        state, logits = mechanisms.decode_step(model, state, tokens[:, at : at + part], jnp.int32(at))
        outputs.append(logits)
    np.testing.assert_allclose(jnp.concatenate(outputs, 1), before, atol=2e-5 * float(jnp.abs(before).max()))


def test_cost():
    dims = HeadDims(12, 12, 64)
    sums = 2 * 153 * (64 * 24 + 12) * (1 - 128 / 8192)
    assert Taylor().flops_per_token(dims, 8192) == 2 * 64 * 16 * 24 + sums + 12 * (16 + 64) * 128


def test_wrong_values_are_named():
    with pytest.raises(ConfigError, match=r'taylor.feature_dim = 0'):
        Taylor(feature_dim=0)
