"""Keys and values of low rank: they equal whole matrices with the same products, for every mechanism."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lm.attention.polynomial import Polynomial
from lm.attention.recurrent.delta import Delta
from lm.attention.softmax import Softmax
from lm.errors import ConfigError
from lm.model import ModelConfig
from lm.model.functions import ModelFunctions, count_parameters
from lm.model.parts.latent import LATENT_EPSILON

TINY = dict(vocab_size=61, n_layers=1, d_model=32, n_heads=4, head_dim=8)
LATENT = dict(latent_rank=6, shared_key_dim=2, value_dim=6)
FORMS = {
    'softmax without positions': Softmax(**LATENT, rotary_base=None),
    'polynomial': Polynomial(**LATENT, qk_norm=True),
    'delta with a convolution': Delta(**LATENT, gate=True, convolution=3),
}


def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 61, (2, 20))


@nnx.jit
def project(block, x, rotation):
    return block.project(x, rotation)


@pytest.mark.parametrize('form', FORMS)
def test_keys_and_values_are_products_of_few_numbers(form):
    """A layer whose matrix of keys and values has these products gives the same. The norm has been made linear."""
    config = ModelConfig(**TINY, attention=FORMS[form])
    functions = ModelFunctions(config, jnp.float32)
    model = functions.merge(jax.jit(functions.init)(3))
    plain = dataclasses.replace(config, attention=dataclasses.replace(FORMS[form], latent_rank=None, shared_key_dim=0))
    other = ModelFunctions(plain, jnp.float32)
    whole = other.merge(jax.jit(other.init)(3))
    ours, theirs = model.layer(0), whole.layer(0)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(1, 1, 32)), jnp.float32)  # one token: one factor of the norm
    rotation = model.rotate_positions(jnp.arange(1))[0]
    normed = ours.normalize(x)
    latent = normed @ ours.latent.down.kernel[...][:, :6]
    factor = 1 / jnp.sqrt(jnp.square(latent).mean() + LATENT_EPSILON)
    up = ours.latent.down.kernel[...][:, :6] @ ours.latent.up.kernel[...] * factor
    shared = jnp.broadcast_to(ours.latent.down.kernel[...][:, None, 6:], (32, 4, 2))
    keys = jnp.concatenate([up[:, :24].reshape(32, 4, 6), shared], axis=-1).reshape(32, 32)
    theirs.qkv.kernel[...] = jnp.concatenate([ours.qkv.kernel[...], keys, up[:, 24:]], axis=1)
    for name in ('convolution', 'q_norm', 'k_norm'):
        setattr(theirs, name, getattr(ours, name))
    found, expected = project(ours, x, rotation), project(theirs, x, rotation)
    for one, two in zip(found[:3], expected[:3], strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=2e-5 * max(1, np.abs(two).max()))


@pytest.mark.parametrize('form', FORMS)
def test_a_token_changes_nothing_before_it_and_decoding_equals_training(form):
    functions = ModelFunctions(ModelConfig(**TINY, attention=FORMS[form]), jnp.float32)
    model = functions.merge(jax.jit(functions.init)(3))
    logits = nnx.jit(lambda model, tokens: model(tokens))
    changed = tokens()
    changed[:, 12] = (changed[:, 12] + 1) % 61
    ours = logits(model, tokens())
    np.testing.assert_array_equal(ours[:, :12], logits(model, changed)[:, :12])
    step = nnx.jit(lambda model, *arguments: model.decode_step(*arguments))
    state, first = step(model, model.init_state(2, 20), tokens()[:, :13], jnp.int32(0))
    _, rest = step(model, state, tokens()[:, 13:], jnp.int32(13))
    np.testing.assert_allclose(jnp.concatenate([first, rest], 1), ours, rtol=0, atol=1e-5 * np.abs(ours).max())


def test_parameters_and_products_are_counted():
    latent, plain = ModelConfig(**TINY, **LATENT), ModelConfig(**TINY, value_dim=6)
    whole, made = 32 * (32 + 24), 32 * (6 + 2) + 6 * (24 + 24)
    counts = [count_parameters(config)['attention'] for config in (plain, latent)]
    assert counts[0] - counts[1] == whole - made - 6  # and the gain of the norm
    assert plain.flops_per_token(64) - latent.flops_per_token(64) == 6 * (whole - made)


@pytest.mark.parametrize(
    ('fields', 'said'),
    [
        (dict(shared_key_dim=2), r'model.shared_key_dim = 2: keys are not latent; set latent_rank'),
        (dict(latent_rank=6, shared_key_dim=8), r'model.shared_key_dim = 8: must be less than model.head_dim = 8'),
        (dict(latent_rank=6, n_kv_heads=2), r'model.latent_rank = 6: each head has a key and a value of its own'),
        (dict(latent_rank=6, biases=True), r'model.latent_rank = 6: latent keys have no biases'),
    ],
)
def test_impossible_latent_keys_are_refused(fields, said):
    with pytest.raises(ConfigError, match=said):
        ModelConfig(**TINY, **fields)
