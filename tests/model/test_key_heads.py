"""Models whose query heads share key heads compute the same with a key head for each query head."""

import grids
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lm.attention import HeadDims
from lm.attention.hedgehog import Hedgehog
from lm.attention.polysketch import Polysketch
from lm.attention.recurrent.delta import Delta
from lm.attention.recurrent.gated_linear import GatedLinear
from lm.attention.recurrent.retention import Retention
from lm.attention.softmax import Softmax
from lm.attention.taylor import Taylor
from lm.attention.window_linear import WindowLinear
from lm.errors import ConfigError
from lm.model import ModelConfig
from lm.model.functions import ModelFunctions
from lm.model.key_heads import clone_key_heads, unshare_key_heads
from lm.parameters import declare
from lm.training.objectives.align import Align

SIZES = dict(vocab_size=37, n_layers=2, d_model=24, n_heads=4, n_kv_heads=2, head_dim=6)
SKETCH = dict(sketch_size=4, per_head=True, gate=True, block=4)
FORMS = {
    'values as queries': (Softmax(), dict(n_value_heads=4)),
    'more values than queries': (Softmax(), dict(n_value_heads=8, qk_norm=True, qk_norm_span='projection')),
    'fewer values than queries': (Softmax(), dict(n_heads=8, n_value_heads=4, value_dim=5, convolution=3)),
    'values of a mechanism': (Delta(n_kv_heads=1, n_value_heads=2), dict(qkv_biases=True)),
    'hedgehog': (Hedgehog(), {}),
    'taylor': (Taylor(feature_dim=3), {}),
    'window_linear': (WindowLinear(window=4), {}),
    'delta': (Delta(), dict(biases=True)),
    'delta gate': (Delta(gate=True), dict(n_value_heads=2)),
    'delta channel': (Delta(gate='channel'), dict(head_dim=2, n_value_heads=4, n_heads=8)),
    'gated_linear ssd': (GatedLinear(gate='ssd'), {}),
    'gated_linear channel': (GatedLinear(gate='channel'), {}),
    'polysketch gaussian': (Polysketch(sketch='gaussian', sketches=2, **SKETCH), {}),
    'polysketch srht': (Polysketch(sketch='srht', **SKETCH), {}),
    'polysketch learned': (Polysketch(sketch='learned', **SKETCH), {}),
}


def make(attention, **options) -> ModelFunctions:
    return ModelFunctions(ModelConfig(**(SIZES | options), attention=attention), jnp.float32)


def draw(functions: ModelFunctions):
    """Returns random weights, in which heads differ."""
    given, rng = functions.init(0), np.random.default_rng(0)
    params = jax.tree.map(lambda x: x + 0.2 * jnp.asarray(rng.normal(size=x.shape), x.dtype), given['params'])
    return given | {'params': params}


@pytest.mark.parametrize('form', grids.draw(FORMS, 6))
def test_copies_compute_what_shared_heads_do(form):
    attention, options = FORMS[form]
    shared = make(attention, **options)
    whole, given = unshare_key_heads(shared), draw(shared)
    cloned = jax.jit(lambda weights: clone_key_heads(shared, weights))(given)
    assert jax.tree.map(jnp.shape, cloned) == jax.tree.map(jnp.shape, whole.abstract)
    heads = [model.config.resolve(model.config.layers[0]).heads for model in (shared, whole)]
    assert heads[1].keys == heads[1].queries == heads[0].queries
    assert heads[1].values == max(heads[0].queries, heads[0].values)
    tokens_BxL = jnp.asarray(np.random.default_rng(1).integers(0, 37, (2, 11)))
    expected, got = (jax.jit(lambda w, m=m: m.merge(w)(tokens_BxL))(w) for m, w in ((shared, given), (whole, cloned)))
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5 * float(jnp.abs(expected).max()))


def test_mechanisms_leave_to_the_model_what_they_left_to_it():
    """Else a layer that the student keeps would not count as the teacher's."""
    pattern = (Softmax(), Softmax(n_kv_heads=1, n_value_heads=8), Softmax(n_heads=8, n_value_heads=2))
    config = unshare_key_heads(make(pattern, n_layers=3, n_value_heads=4)).config
    assert config.layer.n_value_heads == 4
    assert config.pattern[0] == pattern[0]
    assert config.pattern[1:] == (
        Softmax(n_kv_heads=None, n_value_heads=8),
        Softmax(n_heads=8, n_value_heads=None),
    )
    fewer = unshare_key_heads(make(Softmax(), n_heads=8, n_value_heads=4)).config
    assert (fewer.layer.n_value_heads, fewer.pattern) == (None, (Softmax(),))


def test_heads_that_differ_by_their_number_are_refused_by_the_plan():
    teacher, student = make(Retention()), make(Softmax(), n_kv_heads=None)
    with pytest.raises(ConfigError, match=r'clone_key_heads = True: heads of @retention\(\) differ by their number'):
        Align(teacher='t', clone_key_heads=True).check(student, teacher)


def test_heads_in_unknown_places_are_refused_by_the_plan(monkeypatch):
    """A mechanism may come with an array of three numbers per key head, say."""
    build = Hedgehog.build

    def build_with_more(config: Hedgehog, dims: HeadDims, rngs):
        module = build(config, dims, rngs)
        kind = declare('matrix', 'heads', 'features', 'head')
        module.k_weight = nnx.Param(jnp.zeros((dims.n_kv_heads * 3, 2, 2)), **kind)
        return module

    monkeypatch.setattr(Hedgehog, 'build', build_with_more)
    teacher, student = make(Hedgehog()), make(Softmax(), n_kv_heads=None)
    with pytest.raises(ConfigError, match=r'clone_key_heads = True: the heads of @hedgehog\(\) .*set it to False'):
        Align(teacher='t', clone_key_heads=True).check(student, teacher)
