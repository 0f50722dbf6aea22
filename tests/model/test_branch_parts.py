"""Parts that residual branches pass before they are added: each computes, learns and decodes, and exports know it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lm import model as model_lib
from lm.attention.branches import BranchPart
from lm.attention.polynomial import Polynomial
from lm.attention.softmax import Softmax
from lm.config.configurable import REGISTRY
from lm.errors import ConfigError
from lm.interop.formats import FORMATS
from lm.interop.names import from_tensors, to_tensors
from lm.interop.native import find_family
from lm.model import ModelConfig
from lm.model.functions import split
from lm.parameters import declare

TINY = dict(vocab_size=61, n_layers=2, d_model=32, n_heads=4, head_dim=8)


@dataclasses.dataclass(frozen=True)
class Halves(BranchPart):
    """A part for these tests: one factor for all channels."""

    gin_name = 'halves'

    def build(self, width: int, rngs: nnx.Rngs) -> nnx.Module:
        return Factor(width)


class Factor(nnx.Module):
    def __init__(self, width: int):
        self.gain = nnx.Param(jnp.full(width, 0.5), **declare('gain', 'embed', part='norms'))

    def __call__(self, x_TxD: jax.Array) -> jax.Array:
        return x_TxD * self.gain[...].astype(x_TxD.dtype)


KINDS = [Halves(), *(cls() for cls in REGISTRY.values() if issubclass(cls, BranchPart))]
every_part = pytest.mark.parametrize('part', KINDS, ids=[part.gin_name for part in KINDS])


def build(config: ModelConfig) -> model_lib.Transformer:
    return nnx.jit(lambda: model_lib.build(config, seed=3))()


def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 61, (2, 20))


@every_part
def test_a_model_with_the_part_decodes_and_learns(part):
    config = ModelConfig(**TINY, attention=(Softmax(), Polynomial(branch=None)), branch=part)
    model, plain = build(config), build(dataclasses.replace(config, branch=None))
    names = [[name for name in nnx.to_pure_dict(nnx.state(block)) if name.endswith('branch')] for block in model.blocks]
    assert names == [['attention_branch', 'glu_branch'], []]
    forward = nnx.jit(lambda model, tokens: model(tokens))
    expected = forward(model, tokens())
    assert np.abs(expected - forward(plain, tokens())).max() > 1e-3
    state, parts = model.init_state(2, 20), []
    step = nnx.jit(type(model).decode_step)
    for start in (0, 10):
        state, found = step(model, state, tokens()[:, start : start + 10], jnp.int32(start))
        parts.append(found)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), expected, atol=2e-5, rtol=2e-5)
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    loss = lambda p: nnx.merge(graph, p, rest).token_losses(tokens()[:, :-1], tokens()[:, 1:]).mean()  # noqa: E731
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(jax.jit(jax.grad(loss))(params)))


@every_part
def test_exports_hold_the_part_or_refuse_it_by_name(part):
    for owner, config in (
        ('model', ModelConfig(**TINY, attention=Softmax(), branch=part)),
        ('softmax', ModelConfig(**TINY, attention=Softmax(branch=part))),
    ):
        with pytest.raises(ConfigError, match=rf'^{owner}\.branch = {type(part).__name__}'):
            FORMATS['huggingface'].check(config)
        with pytest.raises(ConfigError, match=rf'branch = {type(part).__name__}.*: no class'):
            find_family(dataclasses.replace(config, norm='rms', activation='silu', sinusoids=False))
    _, params, buffers = split(build(config))
    weights = {'params': params, 'buffers': buffers}
    tensors = to_tensors(weights)
    assert 'layers.1.glu_branch.gain' in tensors
    jax.tree.map(np.testing.assert_array_equal, from_tensors(tensors, weights, 'the model'), weights)
