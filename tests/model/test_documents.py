"""Windows of several documents: in every mechanism, predictions depend on their own document alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from mechanisms_list import QUICK_FIRST
from tiny import train_step

from lm import model as model_lib
from lm.attention.softmax import Softmax
from lm.data.dataset import DataConfig
from lm.errors import ConfigError
from lm.model import ModelConfig
from lm.ops.documents import Documents
from lm.tasks.associative_recall import AssociativeRecall
from lm.training.optimizer import OptimizerConfig

EOD = 5
TINY = dict(vocab_size=41, n_layers=2, d_model=32, n_heads=4, n_kv_heads=2, head_dim=8)


@functools.cache
def tiny(attention, **changes) -> model_lib.Transformer:
    return nnx.jit(lambda: model_lib.build(ModelConfig(**TINY, attention=attention, **changes), seed=3))()


def window(*lengths: int, seed: int = 0) -> np.ndarray:
    """Returns a window of documents of these lengths, first tokens included; the first document begins before the
    window."""
    tokens = np.random.default_rng(seed).integers(6, 41, (1, sum(lengths)))
    tokens[0, np.cumsum(lengths)[:-1]] = EOD
    return tokens


@nnx.jit(static_argnames='documents')
def logits(model, tokens, documents=None):
    return model.logits(model.hidden(tokens, *(documents.of(tokens) if documents else ())))


def test_a_document_begins_with_the_token_that_ended_the_previous_one():
    tokens = jnp.asarray([[1, EOD, 2, 3, EOD, EOD, 4], [EOD, 1, 2, 3, 4, 6, 7]])
    joined, restarted = Documents(EOD), Documents(EOD, restart=True)
    starts = joined.starts(tokens)
    assert starts.tolist() == [[0, 1, 1, 1, 4, 5, 5], [0] * 7]
    assert joined.positions(starts).tolist() == list(range(7))
    assert restarted.positions(starts).tolist() == [[0, 0, 1, 2, 0, 0, 1], list(range(7))]


def test_offset_keys_come_from_the_own_document():
    check_alone(tiny(Softmax(), key_offset=0.5, rotary_fraction=0.5))


@pytest.mark.parametrize('attention', QUICK_FIRST)
def test_a_document_in_a_window_equals_the_document_alone(attention):
    check_alone(tiny(attention))


def check_alone(model):
    """The other documents change no bit of it. Here, blocks of mechanisms with a grid begin with the document."""
    tokens, others = window(8, 8, 8), window(8, 8, 8, seed=1)
    others[:, 8:16] = tokens[:, 8:16]
    whole, other = (logits(model, jnp.asarray(t), Documents(EOD, restart=True)) for t in (tokens, others))
    np.testing.assert_array_equal(whole[:, 8:16], other[:, 8:16])
    for part in np.split(np.arange(24), 3):
        alone = logits(model, jnp.asarray(tokens[:, part]))
        np.testing.assert_allclose(whole[:, part], alone, rtol=0, atol=4e-6 * float(jnp.abs(alone).max()))


@pytest.mark.parametrize('attention', QUICK_FIRST)
def test_no_gradient_passes_from_one_document_to_another(attention):
    graph, params, rest = nnx.split(tiny(attention), nnx.Param, ...)
    tokens = window(9, 12, 5)
    own = np.arange(26) // 9 == 1
    own[18:21] = True
    tokens = jnp.asarray(
        np.where(tokens == EOD, EOD, np.where(own, 6, 24) + tokens % 17)
    )  # 6 … 22 is in the middle, 24 … 40 around it

    @jax.jit
    def gradient(params):
        def loss(params):
            return nnx.merge(graph, params, rest).hidden(tokens, *Documents(EOD).of(tokens))[:, 9:21].sum()

        return jax.grad(loss)(params)

    by_row = np.abs(np.asarray(gradient(params)['embedding']['embedding'][...])).max(axis=1)
    assert np.isfinite(by_row).all()
    assert (by_row[24:] == 0).all()
    assert by_row[np.unique(tokens[:, 10:21])].min() > 0


def test_the_training_step_masks_documents_if_configured():
    tokens = jnp.asarray(window(9, 13, 5))
    step = train_step(ModelConfig(**TINY), OptimizerConfig(warmup_steps=1), 10, documents=Documents(EOD))
    state = jax.jit(step.init)(0)
    loss = float(jax.jit(step.train)(state, tokens[None])[1]['loss'])
    masked, joined = (
        float(step.functions.score_targets(state, tokens[:, :-1], tokens[:, 1:], told).nats.mean())
        for told in (Documents(EOD), None)
    )
    assert loss == pytest.approx(masked, rel=1e-6)
    assert loss != pytest.approx(joined, rel=1e-5)


def test_settings_without_effect_are_refused():
    with pytest.raises(ConfigError, match=r'data.restart_positions = True: .* data.mask_documents = True'):
        DataConfig(restart_positions=True)
    with pytest.raises(ConfigError, match=r'data.mask_documents = True: the examples of a task are no documents'):
        DataConfig(task=AssociativeRecall(), mask_documents=True)


def test_data_and_evaluation_decide_which_documents_are_masked():
    class Store:
        def tokenizer(self):
            return type('Tokenizer', (), {'eod_id': 7})

    masked = DataConfig(mask_documents=True, restart_positions=True)
    assert masked.documents(Store()) == Documents(7, restart=True)
    assert masked.documents(Store(), mask=False) is None
    assert DataConfig().documents(Store()) is None
    assert DataConfig().documents(Store(), mask=True) == Documents(7)
    assert masked.documents(None).restart
