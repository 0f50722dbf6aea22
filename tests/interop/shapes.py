"""Small models with random weights, and runs of them without a directory, for the tests of export and import."""

import types

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lm.attention.rotary_scaling import YarnRotary
from lm.data.dataset import DataConfig
from lm.experiment import Experiment
from lm.model import ModelConfig, build
from lm.model.functions import ModelFunctions, split
from lm.tasks.induction_heads import InductionHeads
from lm.training.config import TrainConfig

SIZES = dict(vocab_size=97, n_layers=4, d_model=32, n_heads=4, n_kv_heads=2, head_dim=8)
LLAMA = dict(norm='rms', activation='silu', sinusoids=False, tied=False, rotary_base=500_000.0)
GPT2 = dict(gated=False, biases=True, learned_positions=32, sinusoids=False, rotary_base=None, n_kv_heads=4)

GEMMA = dict(norm='rms', norm_epsilon=1e-3, norm_placement='both', embedding_scale=3.0, qkv_biases=True)
OLMO = dict(norm='rms', norm_placement='after', qk_norm=True, qk_norm_span='projection', rotary_scaling=YarnRotary())

BLOCK = dict(convolution=4, qk_norm=True, output_gate=True)
HEADS = dict(key_offset=0.5, rotary_fraction=0.5, output_gate=True, output_gate_form='sigmoid', output_gate_inputs=0.25)


def experiment(attention, **changes) -> Experiment:
    """Returns an experiment without data: a task needs no tokenizer."""
    model = ModelConfig(**(SIZES | {'attention': attention} | changes))
    train = TrainConfig(context_length=32, tokens_per_step=64)
    return Experiment(model=model, train=train, data=DataConfig(task=InductionHeads()))


def abstract_weights(config: Experiment):
    """Returns parameters and buffers as jax.ShapeDtypeStructs."""
    return ModelFunctions(config.model, 'float32').abstract


def random_weights(config: Experiment, seed: int = 0):
    """Returns parameters and buffers with random arrays, scaled to keep activations near 1."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        name = jax.tree_util.keystr(path)
        spread = 0.3 if 'blocks' in name else 1.0
        around = 1.0 if 'scale' in name else 0.0
        return (around + spread * rng.normal(size=leaf.shape) * 0.5).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, abstract_weights(config))


def run_of(config: Experiment, weights):
    """Returns the parts of a run that a format writes."""
    store = types.SimpleNamespace(fingerprints={})
    return types.SimpleNamespace(experiment=config, weights=weights, store=store, step=7, tokenizer=None, companions={})


def our_logits(config, weights, tokens):
    """Returns the logits of tokens [B, L], computed by `lm`."""
    graph, _, _ = split(nnx.eval_shape(lambda: build(config.model, 0)))
    model = nnx.merge(graph, weights['params'], weights['buffers'])
    return np.asarray(nnx.jit(lambda model, tokens: model(tokens))(model, jnp.asarray(tokens)))
