"""The weights that every mechanism is seen to give: its map of one-hot values, compared with outputs."""

import dataclasses

import jax
import mechanisms
import numpy as np
import pytest
from flax import nnx
from mechanisms_list import MECHANISMS

from lm.attention.performer import Performer
from lm.attention.recurrent.gated_linear import GatedLinear
from lm.attention.softmax import Softmax
from lm.model import ModelConfig, build

MODULES = {name: form[0] if isinstance(form, tuple) else form for name, form in MECHANISMS.items()}
SUMS = {
    'performer sums': Performer(n_features=32, features='relu', renormalize=False),
    'performer signed': Performer(n_features=32, features='trigonometric'),
    'performer both ways': Performer(n_features=32, causal=False),
}


@nnx.jit
def weigh(module, q, k):
    return module.weigh(*module.normalize(q, k))


@nnx.jit
def mix(module, q, k, v):
    return module.mix(*module.normalize(q, k), v)


@pytest.mark.parametrize('form', [pytest.param(form, id=name) for name, form in (MODULES | SUMS).items()])
def test_the_weights_of_a_mechanism_give_its_outputs(form):
    """They do so for any values: the mechanism is linear in them."""
    module, (q, k, v) = mechanisms.build(form), mechanisms.draw()
    weights = np.asarray(weigh(module, q, k))
    assert weights.shape == (2, 4, mechanisms.LENGTH, mechanisms.LENGTH)
    expected = mechanisms.mix_values(weights, np.asarray(v))
    found = mix(module, q, k, v)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    if getattr(form, 'causal', True):
        assert not np.triu(weights, 1).any(), 'a later token has no weight'
    else:
        assert np.triu(weights, 1).any()


@pytest.mark.parametrize('pattern', [Softmax(), (GatedLinear(), Softmax(window=5))], ids=['softmax', 'pattern'])
def test_a_model_gives_the_weights_of_its_layers(pattern):
    config = ModelConfig(vocab_size=40, n_layers=2, d_model=32, n_heads=2, head_dim=16, attention=pattern)
    model, tokens = build(config, 0), jax.random.randint(jax.random.key(1), (2, 21), 0, 40)
    first, second = model.attention_weights(tokens)
    assert first.shape == second.shape == (2, 2, 21, 21)
    np.testing.assert_allclose(second.sum(-1), 1, atol=1e-5)
    assert np.tril(second, -5).any() == isinstance(pattern, Softmax), 'a window ends'
    after = dataclasses.replace(config, norm_placement='after', attention=Softmax())
    assert next(build(after, 0).attention_weights(tokens)).shape == (2, 2, 21, 21)
    changed = next(model.attention_weights(tokens.at[:, 9].add(1) % 40))
    np.testing.assert_array_equal(first[:, :, :9], changed[:, :, :9])
    assert not np.array_equal(first[:, :, 9:], changed[:, :, 9:])
    module, *inputs = next(model.attention_inputs(tokens))
    without_gates = weigh(module, *inputs)
    assert np.allclose(first, without_gates, atol=1e-6) == isinstance(pattern, Softmax), 'gates belong to the weights'
