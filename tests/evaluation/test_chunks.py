"""Windows read chunk by chunk have the losses of the whole window, in the memory of a chunk."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from mechanisms_list import QUICK_FIRST
from tiny import train_step

from lm import model as model_lib
from lm.attention.performer import Performer
from lm.attention.polysketch import Polysketch
from lm.attention.softmax import Softmax
from lm.data.dataset import DataConfig
from lm.errors import ConfigError
from lm.evaluation.chunks import compute_losses_in_chunks
from lm.evaluation.config import EvaluateConfig
from lm.evaluation.perplexity import make_scoring_program
from lm.evaluation.plan import settle_evaluation
from lm.model import ModelConfig
from lm.ops.documents import Documents
from lm.pod.mesh import MeshConfig, make_mesh
from lm.tasks.associative_recall import AssociativeRecall
from lm.training.config import TrainConfig
from lm.training.optimizer import OptimizerConfig

EOD = 5
OPTIMIZER = OptimizerConfig(warmup_steps=1)
TINY = dict(vocab_size=41, n_layers=2, d_model=32, n_heads=4, n_kv_heads=2, head_dim=8, convolution=4)


@functools.cache
def tiny(attention, **changes) -> model_lib.Transformer:
    return nnx.jit(lambda: model_lib.build(ModelConfig(**TINY | changes, attention=attention), seed=3))()


def drawn(length: int, rows: int = 2) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(6, 41, (rows, length + 1)))


@nnx.jit(static_argnames='documents')
def whole(model, tokens, documents=None):
    told = documents.of(tokens[:, :-1]) if documents else ()
    return model.token_losses(tokens[:, :-1], tokens[:, 1:], *told)


@nnx.jit(static_argnames=('chunk', 'documents'))
def walked(model, tokens, chunk, documents=None):
    return compute_losses_in_chunks(model, tokens[:, :-1], tokens[:, 1:], chunk, documents)


@pytest.mark.parametrize('attention', QUICK_FIRST)
@pytest.mark.parametrize('documents', [None, Documents(EOD, restart=True)], ids=['', 'documents'])
def test_chunks_have_the_losses_of_the_whole_window(attention, documents):
    """Chunks of 13, 16 and 16 tokens end at other places than the blocks of 8. Documents begin on both sides of these
    ends, and some chunks hold parts of several documents."""
    tokens = drawn(45)
    if documents:
        tokens = tokens.at[0, jnp.array([3, 13, 28, 30])].set(EOD).at[1, jnp.array([12, 29])].set(EOD)
    found = walked(tiny(attention), tokens, chunk=16, documents=documents)
    np.testing.assert_allclose(found, whole(tiny(attention), tokens, documents=documents), rtol=0, atol=1e-5)


@pytest.mark.parametrize(('length', 'chunk'), [(17, 16), (9, 1), (23, 5)])
def test_chunks_of_any_length_give_the_same_losses(length, chunk):
    """The chunks have a first token alone, single tokens, and lengths below a block and a convolution."""
    model, tokens = tiny((Polysketch(sketch_size=8, block=8, gate=True), Softmax(window=5))), drawn(length)
    np.testing.assert_allclose(walked(model, tokens, chunk=chunk), whole(model, tokens), rtol=0, atol=1e-5)


def test_memory_is_the_memory_of_a_chunk():
    """The tokens and losses themselves come on top."""
    step = train_step(ModelConfig(**TINY, attention=Polysketch(sketch_size=8, block=64)), OPTIMIZER, 10)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])

    def temporaries(length, chunk):
        tokens = jax.ShapeDtypeStruct((1, length + 1), jnp.int32)
        compiled = make_scoring_program(step.functions, mesh, chunk=chunk).lower(step.abstract, tokens).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    short, long = (temporaries(length, 256) for length in (2048, 32_768))
    assert long - short <= 16 * (32_768 - 2048)
    whole = temporaries(32_768, None)
    assert whole > 5 * long
    # A window that fits into one chunk is computed as before.
    assert temporaries(32_768, 32_768) == pytest.approx(whole, rel=1e-3)


def test_devices_share_the_rows():
    step = train_step(ModelConfig(**TINY, attention=Polysketch(sketch_size=8, block=8)), OPTIMIZER, 10)
    state, tokens = jax.jit(step.init)(0), drawn(40, rows=4)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    alone = make_scoring_program(step.functions, mesh)(state, tokens).nats
    mesh = make_mesh(MeshConfig(sequence=2), jax.devices()[:4])
    with jax.set_mesh(mesh):
        shared = make_scoring_program(step.functions, mesh, chunk=16)(state, tokens).nats
    np.testing.assert_allclose(shared, alone, rtol=0, atol=1e-5)


def test_models_that_cannot_read_chunks_are_refused():
    with pytest.raises(ConfigError, match=r'evaluate.chunk = 16: the examples of a task'):
        settle_evaluation(EvaluateConfig(chunk=16), DataConfig(task=AssociativeRecall()), TrainConfig(), ModelConfig())
    with pytest.raises(ConfigError, match=r'performer.causal = False'):
        walked(tiny(Performer(n_features=32, causal=False)), drawn(20), chunk=8)
