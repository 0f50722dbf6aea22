"""Simulated devices that compute wrongly: a bit flips in a product, in memory or on a link of one of four devices."""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import train_step

import lm.model.dense
import lm.ops.dots
import lm.ops.gated_units.xla
from lm.attention.softmax import Softmax
from lm.model import ModelConfig
from lm.ops.platform import DATA_AXES
from lm.pod.mesh import MeshConfig, batch_sharding, make_mesh
from lm.training.optimizer import OptimizerConfig
from lm.training.program import StepProgram, get_shardings
from lm.training.replay import Replay

MODEL = ModelConfig(vocab_size=64, n_layers=1, d_model=32, n_heads=2, head_dim=16, attention=Softmax())
BIT = 12
"""The bit of a float32 that flips: in the middle of the fraction."""


@dataclasses.dataclass
class Bench:
    """A step on simulated devices, its state and batches, and its replay."""

    step: object
    mesh: object
    state: dict
    shape: tuple[int, int, int]
    replay: Replay

    def batch(self, seed: int = 0) -> jax.Array:
        tokens = np.random.default_rng(seed).integers(1, 64, self.shape).astype(np.uint16)
        tokens[:, :, 7] = 0  # a document ends here
        return jax.device_put(tokens, batch_sharding(self.mesh, axis=1))

    def train(self):
        """Compiles the step. It does not donate its state, so that tests can use it twice."""
        shardings = get_shardings(self.replay.program.place_state(self.mesh))
        return jax.jit(self.step.train, out_shardings=(shardings, None))


def make_bench(devices=4, microbatches=2, fsdp=1, sequence=1, model=MODEL, length=16, rows=None, **options) -> Bench:
    optimizer = OptimizerConfig(peak_learning_rate=1e-2, warmup_steps=2)
    step = train_step(model, optimizer, 10, **options)
    mesh = make_mesh(MeshConfig(fsdp=fsdp, sequence=sequence), jax.devices()[:devices])
    shape = microbatches, rows or max(2, devices), length + 1
    program = StepProgram(step, shape, np.dtype(np.uint16))
    with jax.set_mesh(mesh):
        state = program.init_state(program.place_state(mesh), 0)
    return Bench(step, mesh, state, shape, Replay(program, mesh))


def flip(x: jax.Array, is_bad: jax.Array) -> jax.Array:
    """Flips BIT of the first number of x where `is_bad`; gradients pass."""
    flat = jax.lax.stop_gradient(x).astype(jnp.float32).ravel()
    bits = jax.lax.bitcast_convert_type(flat, jnp.uint32)
    wrong = jax.lax.bitcast_convert_type(bits.at[0].set(bits[0] ^ np.uint32(1 << BIT)), jnp.float32)
    return x + jnp.where(is_bad, wrong - flat, 0.0).reshape(x.shape).astype(x.dtype)


@contextlib.contextmanager
def wrong_operation(modules: Sequence[ModuleType], name: str, group: int):
    """In programs that are traced inside, an operation of modules is wrong on one group of devices."""
    plain = getattr(modules[0], name)

    def operation(*arguments):
        y = plain(*arguments)
        if DATA_AXES[0] not in jax.sharding.get_abstract_mesh().manual_axes:
            return y
        return flip(y, jax.lax.axis_index(DATA_AXES[0]) == group)

    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, name, operation)
        yield


wrong_products = functools.partial(wrong_operation, (lm.ops.dots, lm.ops.gated_units.xla), 'product')
wrong_gather = functools.partial(wrong_operation, (lm.model.dense,), 'gather_matrix')
"""With mesh.fsdp, a matrix that is gathered inside a group arrives with a wrong bit."""


@contextlib.contextmanager
def wrong_link(group: int):
    """In programs that are traced inside, integers that arrive by a sum are wrong on one group of devices."""
    plain = jax.lax.psum

    def psum(x, axis):
        is_bad = jax.lax.axis_index(DATA_AXES[0]) == group
        return jax.tree.map(lambda y: y.at[(0,) * y.ndim].add(jnp.where(is_bad, 1, 0).astype(y.dtype)), plain(x, axis))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.lax, 'psum', psum)
        yield


def damage(x: jax.Array, device: int) -> jax.Array:
    """Returns x with BIT of one number flipped in the copy of one device."""
    shards = []
    for i, shard in enumerate(sorted(x.addressable_shards, key=lambda shard: shard.device.id)):
        data = np.array(shard.data)
        if i == device:
            data.view(np.uint32).ravel()[0] ^= np.uint32(1 << BIT)
        shards.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)
