"""Attention in which every token sees all other tokens (`HeadDims.causal = False`)."""

import dataclasses

import jax
import jax.numpy as jnp
import mechanisms
import numpy as np
import pytest

from lm.attention import mechanisms as all_mechanisms
from lm.attention.hedgehog import Hedgehog
from lm.attention.hybrid import Hybrid
from lm.attention.llops import Llops
from lm.attention.performer import Performer
from lm.attention.polynomial import Polynomial
from lm.attention.polysketch import Polysketch
from lm.attention.recurrent.delta import Delta
from lm.attention.recurrent.gated_linear import GatedLinear
from lm.attention.recurrent.retention import Retention
from lm.attention.softmax import Softmax
from lm.attention.taylor import Taylor
from lm.errors import ConfigError
from lm.model import ModelConfig, Transformer, build

BOTH_WAYS = dataclasses.replace(mechanisms.DIMS, causal=False)
FORMS = {
    'softmax': Softmax(),
    'polynomial': Polynomial(),
    'performer': Performer(n_features=32, block=16),
    'performer relu': Performer(n_features=32, block=16, features='relu'),
    'performer sums': Performer(n_features=32, features='relu', renormalize=False),
    'performer signed': Performer(n_features=32, features='trigonometric'),
    'llops': Llops(n_features=16),
    'taylor': Taylor(feature_dim=4),
    'hedgehog': Hedgehog(),
    'polysketch': Polysketch(sketch_size=8, local=False),
}
CAUSAL = {
    'softmax.window = 5': Softmax(window=5),
    'softmax.gate = True': Softmax(gate=True),
    'polynomial.gate = True': Polynomial(gate=True),
    'polysketch.local = True': Polysketch(),
    'polysketch.gate = True': Polysketch(local=False, gate=True),
    '@hybrid()': Hybrid(),
    '@retention()': Retention(),
    '@delta()': Delta(),
    '@gated_linear()': GatedLinear(),
}


KNOWN = {type(one) for one in (*FORMS.values(), *CAUSAL.values())}
OTHERS = {name: cls() for name, cls in all_mechanisms().items() if cls not in KNOWN}
FORMS |= {name: one for name, one in OTHERS.items() if one.why_causal() is None}
CAUSAL |= {name: one for name, one in OTHERS.items() if one.why_causal() is not None}


@pytest.mark.parametrize('name', FORMS)
def test_all_tokens_are_treated_alike(name):
    """Permuted tokens give permuted outputs. The last query gives the same output as with a causal mask."""
    signed = name == 'performer signed'
    inputs = mechanisms.draw(size=0.3 if signed else 1.0, shift=0.5 if signed else 0.0)
    module = mechanisms.build(FORMS[name], BOTH_WAYS)
    found = np.asarray(mechanisms.apply(module, *inputs))
    atol = 1e-4 * np.abs(found).max()
    order = np.random.default_rng(0).permutation(mechanisms.LENGTH)
    np.testing.assert_allclose(mechanisms.apply(module, *(x[:, order] for x in inputs)), found[:, order], atol=atol)
    causal = np.asarray(mechanisms.apply(mechanisms.build(FORMS[name]), *inputs))
    np.testing.assert_allclose(found[:, -1], causal[:, -1], atol=atol)
    assert np.abs(found[:, 0] - causal[:, 0]).max() > 1e-2 * np.abs(found).max()


def test_the_field_of_performer_and_the_model_agree():
    """Configurations that set the field still work; without it, the model decides."""
    inputs = mechanisms.draw()
    by_field = mechanisms.build(dataclasses.replace(FORMS['performer'], causal=False))
    by_model = mechanisms.build(FORMS['performer'], BOTH_WAYS)
    np.testing.assert_array_equal(mechanisms.apply(by_field, *inputs), mechanisms.apply(by_model, *inputs))
    tiny = dict(vocab_size=28, n_layers=2, d_model=32, n_heads=2, head_dim=16)
    assert ModelConfig(**tiny).looks_ahead is None
    assert ModelConfig(**tiny, causal=False).looks_ahead == 'model.causal = False'
    old = ModelConfig(**tiny, attention=(Softmax(), Performer(n_features=8, causal=False)))
    assert old.looks_ahead == 'performer.causal = False'


@pytest.mark.parametrize('name', CAUSAL)
def test_a_causal_mechanism_refuses_a_model_that_is_not_causal(name):
    with pytest.raises(ConfigError, match=r'^model\.causal = False: ') as error:
        ModelConfig(attention=CAUSAL[name], causal=False)
    assert name in str(error.value)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('name', ['softmax', 'performer', 'performer relu', 'polysketch'])
def test_a_model_whose_tokens_see_all_others(name):
    """Every logit depends on every token, and the model refuses to decode."""
    config = ModelConfig(
        vocab_size=28, n_layers=2, d_model=32, n_heads=2, head_dim=16, attention=FORMS[name], causal=False
    )
    model: Transformer = build(config, 0)
    tokens = jax.random.randint(jax.random.key(0), (2, 21), 0, 28)
    before = model(tokens)
    for at in (0, 20):
        changed = np.abs(model(tokens.at[0, at].add(1) % 28) - before).max(-1)
        assert (changed[0] > 1e-6).all()
        assert (changed[1] == 0).all()
    with pytest.raises(ConfigError, match=r'model\.causal = False: no text can be written'):
        model.init_state(1, 8)


def test_flops_count_the_whole_square():
    length, dims = 512, mechanisms.DIMS
    causal, both = (Softmax().flops_per_token(d, length) for d in (dims, BOTH_WAYS))
    assert both == 2 * causal == 4 * 4 * 16 * length
    for name in ('performer', 'llops', 'taylor', 'hedgehog'):
        # The count per token is the same for any length: there are no blocks.
        assert FORMS[name].flops_per_token(BOTH_WAYS, 64) == FORMS[name].flops_per_token(BOTH_WAYS, 4096)


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_lengths_beyond_a_block_agree_with_the_reference(dtype):
    """The fast path of XLA must agree with the reference over many blocks and an odd remainder."""
    from lm.ops.linear_attention import linear_attention

    keys = jax.random.split(jax.random.key(1), 3)
    q, k, v = (jax.random.uniform(key, (2, 1037, n, 16)).astype(dtype) for key, n in zip(keys, (4, 2, 2), strict=True))
    options = dict(denominator_bias=0.0, causal=False)
    exact = linear_attention(*(x.astype(jnp.float32) for x in (q, k, v)), **options, implementation='reference')
    found = linear_attention(q, k, v, **options, implementation='xla')
    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(np.asarray(found, np.float32), exact, atol=tolerance * float(jnp.abs(exact).max()))
