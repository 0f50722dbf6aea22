"""DeepSeek-V2's attention (DeepSeek-AI 2024, §2.1, eq. 9 to 19) against a float64 model of its equations."""

import functools
import math

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
from lm.ops.documents import Documents

HEADS, WIDTH, SIZE, RANK, SHARED, VALUE, QUERY_RANK, LENGTH = 3, 24, 10, 7, 4, 6, 9, 13
MODEL = dict(vocab_size=31, n_layers=1, d_model=WIDTH, n_heads=HEADS, head_dim=SIZE, hidden_dim=16)
LATENT = dict(latent_rank=RANK, shared_key_dim=SHARED, value_dim=VALUE, rotary_decoupled=True)
BASE = 100.0
FORMS = {
    'queries of low rank': Softmax(**LATENT, latent_query_rank=QUERY_RANK),
    'whole queries': Softmax(**LATENT),
    'sinks in a window': Softmax(**LATENT, latent_query_rank=QUERY_RANK, sinks=True, window=5),
}


def functions_of(attention, **changes) -> ModelFunctions:
    return ModelFunctions(ModelConfig(**MODEL | changes, rotary_base=BASE, attention=attention), jnp.float32)


@functools.cache
def weights_of(form: str):
    functions = functions_of(FORMS[form])

    def spread(path, x):
        """Gains and sinks that are not 1 and 0."""
        return x + 0.3 * np.random.default_rng(len(str(path))).normal(size=x.shape).astype(x.dtype) * (x.ndim < 3)

    return functions, jax.tree_util.tree_map_with_path(spread, jax.jit(functions.init)(3))


def normalize(x, gain):
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + LATENT_EPSILON) * gain


def turn(x_LxNxS, positions):
    """Turns the pairs (s, s + S/2) by position · base^(-2 s / S)."""
    pairs = np.arange(SHARED // 2)
    angle = positions[:, None, None] * BASE ** (-2 * pairs / SHARED)
    a, b = x_LxNxS[..., : SHARED // 2], x_LxNxS[..., SHARED // 2 :]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)


def attend(block, x_LxD, positions, starts, window=None):
    """Returns u of eq. 19 for one sequence, head by head; `starts` is the first token of each token's document."""
    as_64 = lambda variable: np.asarray(variable[...], np.float64)  # noqa: E731
    own = SIZE - SHARED
    inputs = x_LxD
    if block.latent_queries is not None:  # eq. 12 and 13
        inputs = normalize(x_LxD @ as_64(block.latent_queries.down.kernel), as_64(block.latent_queries.norm.scale))
    queries = (inputs @ as_64(block.qkv.kernel)).reshape(-1, HEADS, SIZE)
    down = x_LxD @ as_64(block.latent.down.kernel)
    latent = normalize(down[:, :RANK], as_64(block.latent.norm.scale))  # eq. 9
    made = latent @ as_64(block.latent.up.kernel)
    keys, values = made[:, : HEADS * own].reshape(-1, HEADS, own), made[:, HEADS * own :].reshape(-1, HEADS, VALUE)
    shared = turn(down[:, None, RANK:], positions)[:, 0]  # eq. 15
    turned = turn(queries[..., own:], positions)  # eq. 14
    outputs = []
    for h in range(HEADS):
        scores = (queries[:, h, :own] @ keys[:, h].T + turned[:, h] @ shared.T) / math.sqrt(SIZE)  # eq. 16 to 18
        i, j = np.arange(len(x_LxD))[:, None], np.arange(len(x_LxD))
        seen = (j <= i) & (j >= starts[:, None]) & (j > i - (window or len(x_LxD)))
        sink = as_64(block.attention.sinks)[h] if block.attention.sinks is not None else -np.inf
        powers = np.where(seen, np.exp(scores), 0.0)
        outputs.append(powers @ values[:, h] / (powers.sum(-1, keepdims=True) + np.exp(sink)))
    return np.concatenate(outputs, -1) @ as_64(block.attention_out.kernel)


@pytest.mark.parametrize('form', FORMS)
def test_a_layer_equals_the_published_equations(form):
    """Two documents of odd lengths in a window of odd length; positions begin anew in each."""
    functions, weights = weights_of(form)
    model = functions.merge(weights)
    block = model.layer(0)
    x = np.random.default_rng(1).normal(size=(1, LENGTH, WIDTH))
    starts = np.array([0] * 5 + [5] * (LENGTH - 5))
    positions = np.arange(LENGTH) - starts

    @nnx.jit
    def mix(model, block, x):
        rotation = model.rotate_positions(jnp.asarray(positions)[None])[0]
        return block.mix(x, rotation, jnp.asarray(starts)[None])

    expected = attend(block, x[0], positions, starts, FORMS[form].window)
    found = mix(model, block, jnp.asarray(x, jnp.float32))[0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize('form', ['queries of low rank', 'sinks in a window'])
def test_decoding_keeps_latent_keys_and_equals_the_whole_window(form):
    """Pieces of the text, with documents too: the cache holds rank + shared numbers per token and nothing else."""
    functions, weights = weights_of(form)
    tokens = np.random.default_rng(0).integers(1, 31, (2, LENGTH))
    tokens[0, 6] = 0  # ends a document
    graph = functions.graph

    @jax.jit
    def whole(weights, tokens):
        positions, starts = Documents(0, restart=True).of(tokens)
        return nnx.merge(graph, *weights.values()).hidden(tokens, positions, starts)

    @functools.partial(jax.jit, static_argnums=(3, 4))
    def extend(weights, state, tokens, first, end):
        positions, starts = (x[:, first:end] for x in Documents(0, restart=True).of(tokens))
        model = nnx.merge(graph, *weights.values())
        return model.extend(state, tokens[:, first:end], positions, starts - first)

    expected = whole(weights, jnp.asarray(tokens))
    state, parts = functions.merge(weights).init_state(2, LENGTH, documents=True), []
    kept = min(LENGTH, FORMS[form].window or LENGTH)
    arrays = {leaf.shape for leaf in jax.tree.leaves(state) if leaf.size > 1}
    assert arrays == {(1, 2, kept, 1, RANK + SHARED)}
    for first, end in ((0, 5), (5, LENGTH)):
        state, part = extend(weights, state, jnp.asarray(tokens), first, end)
        parts.append(part)
    np.testing.assert_allclose(jnp.concatenate(parts, 1), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_arrays_and_products_are_counted_and_shared():
    """The matrices of queries are two, with a gain between; all are declared for sharding."""
    plain, low = (functions_of(Softmax(**LATENT, latent_query_rank=rank)) for rank in (None, QUERY_RANK))
    queries, made = WIDTH * HEADS * SIZE, WIDTH * QUERY_RANK + QUERY_RANK * HEADS * SIZE
    counts = [count_parameters(one.config)['attention'] for one in (plain, low)]
    assert counts[0] - counts[1] == queries - made - QUERY_RANK
    assert plain.config.flops_per_token(64) - low.config.flops_per_token(64) == 6 * (queries - made)
    block = low.declared['blocks'][0]
    assert block['latent_queries']['down']['kernel'].axes == ('layer', 'embed', 'logits')
    assert block['qkv']['kernel'].axes == ('layer', 'logits', 'all_heads')
    assert block['latent_queries']['norm']['scale'].axes == ('layer', 'logits')


def test_other_mechanisms_keep_whole_keys_or_a_state():
    for attention in (Polynomial(**LATENT), Delta(**LATENT, gate=True), Softmax(**LATENT, qk_norm=True)):
        functions = functions_of(attention)
        state = jax.eval_shape(lambda functions=functions: functions.merge(functions.init(0)).init_state(1, 8))
        assert any(leaf.shape[-2:] == (HEADS, SIZE) or HEADS in leaf.shape for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize(
    ('fields', 'said'),
    [
        (dict(latent_query_rank=4), r'model.latent_query_rank = 4: keys are not latent; set latent_rank'),
        (dict(rotary_decoupled=True), r'model.rotary_decoupled = True: keys are not latent; set latent_rank'),
        (dict(latent_rank=6, rotary_decoupled=True), r'model.rotary_decoupled = True: .*; set shared_key_dim'),
        (LATENT | dict(shared_key_dim=3), r'model.shared_key_dim = 3: .*; make it even'),
        (LATENT | dict(rotary_base=None), r'model.rotary_decoupled = True: .*; set rotary_base'),
        (LATENT | dict(key_offset=0.5), r'model.rotary_decoupled = True: .*; set key_offset to 0'),
    ],
)
def test_impossible_forms_are_refused(fields, said):
    with pytest.raises(ConfigError, match=said):
        ModelConfig(**MODEL | fields)
