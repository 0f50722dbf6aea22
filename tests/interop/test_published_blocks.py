"""Layers of Qwen3-Next and Kimi Linear compute what `transformers` computes, with random weights."""

import jax
import jax.numpy as jnp
import numpy as np
import published_blocks as blocks
import pytest


def outputs(model) -> jax.Array:
    """Returns the outputs of the layer, [1, L, D]."""
    rotation = model.rotate_positions(jnp.arange(blocks.LENGTH))[0]
    return jax.jit(lambda x: model.layer(0)(x, rotation))(blocks.draw_inputs())


def decode(model) -> jax.Array:
    """Returns the outputs of the layer, computed from a state in pieces."""
    block, x = model.layer(0), blocks.draw_inputs()
    step, parts = jax.jit(block.decode_step), []
    state = block.init_state(1, blocks.LENGTH, jnp.float32)
    for start, end in ((0, 30), (30, 31), (31, 70)):
        rotation = model.rotate_positions(jnp.arange(start, end))[0]
        state, part = step(state, x[:, start:end], rotation)
        parts.append(part)
    return jnp.concatenate(parts, axis=1)


@pytest.mark.parametrize('form', blocks.FORMS)
def test_our_layer_has_the_recorded_outputs(form):
    recorded = blocks.load()[form]
    model = blocks.make_model(form, blocks.draw_tensors(form, recorded['tensors']))
    ours, expected = outputs(model), np.array(list(recorded['outputs'].values()))
    np.testing.assert_allclose(ours[0, blocks.TOKENS, :], expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_allclose(decode(model), ours, rtol=0, atol=1e-5 * np.abs(ours).max())


@pytest.mark.interop
@pytest.mark.parametrize('form', blocks.FORMS)
def test_our_layer_computes_what_transformers_computes(form):
    transformers = pytest.importorskip('transformers', reason='needs transformers: scripts/test.sh -m interop')
    pytest.importorskip('transformers.models.kimi_linear', reason=f'transformers {transformers.__version__} lacks it')
    shapes, expected = blocks.compute(form)
    assert shapes == blocks.load()[form]['tensors']
    ours = outputs(blocks.make_model(form, blocks.draw_tensors(form, shapes)))
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
