"""One window on several devices has the losses, gradients and evaluations of one device, in every mechanism."""

import dataclasses
import functools
import importlib.util

import grids
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from mechanisms_list import QUICK_FIRST
from tiny import train_step

from lm.attention.hybrid import Hybrid
from lm.attention.polysketch import Polysketch
from lm.attention.recurrent.delta import Delta
from lm.attention.recurrent.gated_linear import GatedLinear
from lm.attention.softmax import Softmax
from lm.errors import ConfigError
from lm.evaluation.scoring import Scorer
from lm.experiment import load
from lm.hardware import describe_devices, parse
from lm.model import ModelConfig
from lm.ops.documents import Documents
from lm.ops.errors import OperationError
from lm.plan import plan_step, validate
from lm.pod import mesh as mesh_lib
from lm.pod.mesh import MeshConfig, batch_sharding, make_mesh, place
from lm.training.config import TrainConfig
from lm.training.optimizer import OptimizerConfig
from lm.training.program import get_shardings
from lm.training.step import TrainStep

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='libtpu is not installed')
EOD = 5
TINY = dict(vocab_size=41, d_model=32, n_heads=4, n_kv_heads=2, head_dim=8)
LENGTH = 32


def step_of(attention, documents=None) -> TrainStep:
    layers = len(attention) if isinstance(attention, tuple) else 2
    model = ModelConfig(**TINY, n_layers=layers, attention=attention)
    return train_step(model, OptimizerConfig(warmup_steps=1), 10, documents=documents)


def mesh_of(devices: int, **config):
    return make_mesh(MeshConfig(**config), jax.devices()[:devices])


def tokens(rows: int = 2, length: int = LENGTH) -> np.ndarray:
    drawn = np.random.default_rng(0).integers(6, 41, (1, rows, length + 1))
    drawn[0, 0, [3, 17, 18]] = drawn[0, 1, 25] = EOD
    return drawn


@functools.cache
def initial(attention):
    """Returns the initial state of a run, for any devices."""
    return jax.tree.map(np.asarray, jax.jit(step_of(attention).init)(0))


@functools.cache
def gradients(attention, documents, devices, **config):
    """Returns the loss, the gradients of every parameter, and the nats of every token."""
    step, mesh = step_of(attention, documents), mesh_of(devices, **config)
    with jax.set_mesh(mesh):
        state = jax.device_put(initial(attention), get_shardings(place(step.abstract, mesh, step.functions.declared)))
        batch = jax.device_put(tokens(), batch_sharding(mesh, axis=1))

        @jax.jit
        def run(params, buffers, batch):
            def loss(params):
                weights = {'params': params, 'buffers': buffers}
                nats = step.functions.score_targets(weights, batch[0, :, :-1], batch[0, :, 1:], documents).nats
                return nats.mean(), nats

            return jax.value_and_grad(loss, has_aux=True)(params)

        (_, nats), found = run(state['params'], state['buffers'], batch)
    return jax.tree.map(np.asarray, (nats, found))


def assert_same(got, expected):
    """Compares losses to 1e-6 of the largest loss, and each parameter's gradient to 1e-4 of its length."""
    (nats, gradients), (want_nats, want_gradients) = got, expected
    np.testing.assert_allclose(nats, want_nats, rtol=0, atol=1e-6 * np.abs(want_nats).max())
    for (path, want), one in zip(
        jax.tree_util.tree_leaves_with_path(want_gradients), jax.tree.leaves(gradients), strict=True
    ):
        assert np.linalg.norm(one - want) <= 1e-4 * np.linalg.norm(want), jax.tree_util.keystr(path)


@pytest.mark.parametrize('attention', QUICK_FIRST)
def test_four_devices_share_a_window(attention):
    alone = gradients(attention, Documents(EOD), 1)
    assert_same(gradients(attention, Documents(EOD), 4, sequence=4), alone)


AXES = {'fsdp': (8, dict(sequence=4, fsdp=2)), 'data': (4, dict(sequence=2)), 'alone': (4, dict(sequence=4))}
OWN_OPTIONS = (
    Delta(
        gate=True, rotary_base=None, convolution=4, output_gate=True, output_gate_form='sigmoid', n_heads=2, head_dim=12
    ),
    Softmax(rotary_base=None, key_offset=0.5, qk_norm=True, n_kv_heads=1),
)
WIDE = (
    Delta(gate='channel', convolution=4, rotary_base=None, n_heads=2, n_kv_heads=2, n_value_heads=4, value_dim=12),
    GatedLinear(gate='ssd', n_heads=1, n_kv_heads=1, n_value_heads=2, value_dim=4),
    Softmax(window=5, n_heads=2, n_kv_heads=1, n_value_heads=2, value_dim=12, key_offset=0.5),
)
EXACT, WINDOW, SKETCH, HYBRID = Softmax(), Softmax(window=5), Polysketch(sketch_size=8, block=8), Hybrid(window=5)


@pytest.mark.parametrize(
    ('attention', 'axis', 'documents'),
    [
        *grids.draw(
            [
                (EXACT, 'fsdp', None),
                (WINDOW, 'data', Documents(EOD)),
                (SKETCH, 'fsdp', None),
                (HYBRID, 'fsdp', Documents(EOD)),
                (OWN_OPTIONS, 'data', Documents(EOD)),
                (OWN_OPTIONS, 'alone', Documents(EOD)),
                (WIDE, 'data', Documents(EOD)),
                (WIDE, 'alone', None),
            ],
            3,
        ),
        *(
            pytest.param(*rest, None, marks=pytest.mark.slow)
            for rest in ((EXACT, 'data'), (WINDOW, 'fsdp'), (WINDOW, 'data'), (SKETCH, 'data'), (HYBRID, 'fsdp'))
        ),
    ],
)
def test_windows_are_shared_beside_other_axes_and_without_documents(attention, axis, documents, monkeypatch):
    monkeypatch.setattr(mesh_lib, 'MIN_SHARDED_SIZE', 1)
    devices, mesh = AXES[axis]
    assert_same(gradients(attention, documents, devices, **mesh), gradients(attention, documents, 1))


def test_parts_of_a_window_take_keys_from_the_part_before():
    step = train_step(ModelConfig(**TINY, attention=SKETCH, key_offset=0.5), OptimizerConfig(warmup_steps=1), 10)
    state, rows = jax.jit(step.init)(0), jnp.asarray(tokens()[0])
    score = jax.jit(lambda *arrays: step.functions.score_targets(*arrays, Documents(EOD)).nats)
    alone = score(state, rows[:, :-1], rows[:, 1:])
    with jax.set_mesh(mesh_of(4, sequence=4)):
        shared = score(state, rows[:, :-1], rows[:, 1:])
    np.testing.assert_allclose(shared, alone, rtol=0, atol=1e-5)


def test_microbatches_of_parts_of_windows():
    step = step_of(Softmax(), Documents(EOD))
    rows = tokens(rows=4).reshape(2, 2, -1)
    weights = {name: initial(Softmax())[name] for name in ('params', 'buffers')}
    alone = jax.jit(step._gradients)(weights, rows, 0)
    with jax.set_mesh(mesh_of(4, sequence=2)):
        loss, gradients, _ = jax.jit(step._gradients)(weights, rows, 0)
    assert_same((loss, gradients), alone[:2])


def test_windows_that_cannot_be_split_are_computed_whole():
    step, (rows,) = step_of(Softmax()), jnp.asarray(tokens(length=30))
    state = jax.jit(step.init)(0)
    alone = step.functions.score_targets(state, rows[:, :-1], rows[:, 1:]).nats
    with jax.set_mesh(mesh_of(4, sequence=4)):
        whole = jax.jit(step.functions.score_targets)(state, rows[:, :-1], rows[:, 1:]).nats
    np.testing.assert_allclose(whole, alone, atol=1e-5)


@pytest.mark.compiles
@needs_libtpu
@pytest.mark.parametrize('axes', [dict(sequence=4), dict(sequence=2, fsdp=2)])
@pytest.mark.parametrize('attention', [Softmax(), Polysketch(sketch_size=8)])
def test_kernels_run_on_whole_arrays_of_each_device(attention, axes):
    """The cases: all devices share one window, and some devices do. The compiler must split no kernel."""
    config = ModelConfig(**TINY | {'head_dim': 32}, attention=attention)
    step = train_step(config, OptimizerConfig(warmup_steps=1), 10, platform='tpu')
    mesh = make_mesh(MeshConfig(**axes), describe_devices(parse('v5e:2x2')))
    with jax.set_mesh(mesh):
        state = place(step.abstract, mesh, step.functions.declared)
        tokens_BxL = jax.ShapeDtypeStruct((2, 128), jnp.int32, sharding=batch_sharding(mesh))

        def hidden(params, buffers, tokens_BxL):
            return step.functions.merge({'params': params, 'buffers': buffers}).hidden(tokens_BxL)

        traced = jax.jit(hidden).trace(state['params'], state['buffers'], tokens_BxL)
        assert 'tpu_custom_call' in traced.lower(lowering_platforms=('tpu',)).as_text()


CUT = {
    'mesh.sequence': 2,
    'train.objective': '@masked()',
    'model.n_layers': 1,
    'model.d_model': 16,
    'model.n_heads': 1,
    'model.head_dim': 16,
}


@pytest.mark.parametrize('setting', ['performer.causal', 'model.causal'])
def test_a_mechanism_that_cannot_share_a_window_is_named(setting):
    given = CUT | {'model.attention': '@performer()', setting: False}
    experiment = load([], [word for word in tiny.params(given) if word != '--gin_param'])
    for refuse in (validate, plan_step):
        with pytest.raises(ConfigError, match=rf'mesh.sequence = 2: @performer\(\) shares .* {setting} = False; set'):
            refuse(experiment)
    alone = dataclasses.replace(experiment, mesh=MeshConfig())
    alone.model.check_parts(alone.mesh.sequence)
    ModelConfig(**TINY, attention=Softmax(), causal=False).check_parts(2)


def test_windows_and_parts_that_cannot_be_split_are_refused():
    with pytest.raises(ConfigError, match=r'mesh.sequence = 3: must divide the 8 groups of mesh.fsdp devices'):
        make_mesh(MeshConfig(sequence=3))
    with pytest.raises(ConfigError, match=r'mesh.sequence = 4: must divide train.context_length = 30'):
        TrainConfig(context_length=30, tokens_per_step=30).check_parts(4)
    for attention, text in (
        (Polysketch(block=6), 'exact blocks of 6'),
        (Hybrid(window=9), 'shorter than the window of 9'),
    ):
        with pytest.raises(OperationError, match=f'mesh.sequence: parts of 8 tokens are .*{text}'):
            gradients(attention, None, 4, sequence=4)


@pytest.mark.parametrize(
    ('attention', 'length', 'reason'),
    [
        (Polysketch(block=32), 96, 'no multiple of polysketch.block = 32'),
        (Hybrid(window=40), 64, 'shorter than hybrid.window = 40'),
        (Polysketch(block=32), 64, None),
        (Polysketch(block=32), 63, None),
        (Polysketch(local=False), 96, None),
        (Softmax(window=90), 64, None),
    ],
)
def test_the_plan_refuses_parts_that_a_mechanism_cannot_take(attention, length, reason):
    model = ModelConfig(**TINY, n_layers=1, attention=attention)
    model.check_parts(1, length)
    if reason is None:
        model.check_parts(2, length)
        return
    with pytest.raises(
        ConfigError, match=f'train.context_length = {length} makes parts of {length // 2} tokens, {reason}'
    ):
        model.check_parts(2, length)


def test_texts_of_any_length_are_scored_on_parts():
    """A text of 40 tokens is padded to 64 on one device: parts of 32 fit. One of 80 is padded to 96, which do not."""
    functions = step_of(Polysketch(block=32, sketch_size=4)).functions
    weights = functions.init(0)
    rows = [tokens(length=128)[0, 0, : length + 1] for length in (5, 40, 80, 128)]
    found = []
    for devices in (1, 2):
        mesh = mesh_of(devices, sequence=devices)
        placed = jax.device_put(weights, get_shardings(place(functions.abstract, mesh, functions.declared)))
        found.append([scored.nats for scored in Scorer(functions, mesh, placed, 128, 4).score_rows(rows)])
    for alone, shared in zip(*found, strict=True):
        np.testing.assert_allclose(shared, alone, atol=1e-5)
