"""Steps of a mixture of experts are the same on any mesh, balance loss included, and go on from a checkpoint."""

import functools

import grids
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import train_step

from lm.model import ModelConfig, routers
from lm.model.feed_forward import DenseLayer
from lm.model.feed_forward.experts import Experts
from lm.pod.mesh import MeshConfig, batch_sharding, make_mesh
from lm.training.optimizer import OptimizerConfig
from lm.training.program import get_shardings, place

EXPERTS = Experts(n_experts=4, shared_dim=32, shared_gate=True, balance=1.0)
MODEL = ModelConfig(vocab_size=64, n_layers=2, d_model=64, n_heads=4, head_dim=16, feed_forward=(DenseLayer(), EXPERTS))


def make():
    return train_step(MODEL, OptimizerConfig(peak_learning_rate=1e-2, warmup_steps=2), steps=10)


def batch(microbatches: int) -> jax.Array:
    tokens = np.random.default_rng(0).integers(0, 64, (microbatches, 8 // microbatches, 33))
    return jnp.asarray(tokens, jnp.uint16)


def train(step, state, rows):
    """Returns the state after two steps, as arrays of NumPy, and the losses and measures of routers."""
    run, losses = jax.jit(step.train, out_shardings=(get_shardings(state), None)), []
    for _ in range(2):
        state, metrics = run(state, rows)
        losses.append((float(metrics['loss']), *np.array(metrics[routers.LOAD]), *np.array(metrics[routers.SCORE])))
    return jax.tree.map(np.asarray, state['params']), losses


@functools.cache
def alone(microbatches: int):
    step = make()
    return train(step, jax.jit(step.init)(0), batch(microbatches))


@pytest.mark.parametrize(
    ('devices', 'settings', 'microbatches'),
    grids.draw([(4, {}, 1), (4, {'fsdp': 2}, 1), (4, {'fsdp': 2}, 2), (4, {}, 2), (2, {'sequence': 2}, 1)], 3),
)
def test_any_mesh_takes_the_same_steps(devices, settings, microbatches):
    expected, losses = alone(microbatches)
    mesh = make_mesh(MeshConfig(**settings), jax.devices()[:devices])
    with jax.set_mesh(mesh):
        step = make()
        abstract = place(jax.eval_shape(lambda: step.init(0)), mesh, step.functions.declared)
        state = jax.jit(lambda: step.init(0), out_shardings=jax.tree.map(lambda x: x.sharding, abstract))()
        experts = state['params']['blocks'][1]['experts']['glu_in']
        assert experts.addressable_shards[0].data.size == experts.size // settings.get('fsdp', 1)
        rows = jax.device_put(batch(microbatches), batch_sharding(mesh, axis=1))
        found, ours = train(step, state, rows)
    np.testing.assert_allclose(ours, losses, rtol=1e-5)
    # Adam divides by the root of a small square, so that small differences grow.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-4), found, expected)
