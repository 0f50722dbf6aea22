"""What the devices of a slice exchange in a training step compiled for it: gradients, and shared matrices; never what
flows through the layers, each device's own."""

import importlib.util
import re

import jax
import pytest
import tiny

from lm.experiment import load, training_step
from lm.hardware import describe_devices, parse
from lm.training.mesh import make_mesh
from lm.training.program import compile_described

pytestmark = pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='libtpu is not installed')
CONFIGS = tiny.ROOT / 'configs' / 'attention'
TOPOLOGY = 'v5e:2x2'
LENGTH = 1024
SMALL = {
    'model.n_layers': 2,
    'model.d_model': 256,
    'model.n_heads': 4,
    'model.vocab_size': 1280,
    'model.remat': "'dots'",
    'train.context_length': LENGTH,
    'optimizer.warmup_steps': 1,
}


def collectives(mechanism: str, **params) -> list[tuple[str, str]]:
    """(kind, what comes out) of each collective in the program."""
    settings = SMALL | {name.replace('__', '.'): value for name, value in params.items()}
    experiment = load([str(CONFIGS / f'{mechanism}.gin')], [f'{name} = {value}' for name, value in settings.items()])
    topology = parse(TOPOLOGY)
    mesh = make_mesh(experiment.mesh, describe_devices(topology))
    with jax.set_mesh(mesh):
        step, dtype = training_step(experiment), experiment.data.dtype(experiment.model.vocab_size)
        text = compile_described(step, experiment.train, dtype, mesh, topology).text
    kinds = 'all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter'
    return [(kind, result) for result, kind in re.findall(rf' = (.*?) ({kinds})(?:-start)?\(', text)]


def check_data_parallel(mechanism: str, windows: int) -> None:
    found = collectives(mechanism, train__tokens_per_step=4 * windows * LENGTH)
    assert {kind for kind, _ in found} == {'all-reduce'}, found


@pytest.mark.parametrize('windows', [pytest.param(1, marks=pytest.mark.slow), 2])
def test_devices_that_share_no_matrices_exchange_gradients_alone(windows):
    """Layouts that the model asks for on TPUs are opaque to the partitioner of JAX 0.10: each device gathered the
    activations of all, in every layer. `windows`: of a device."""
    check_data_parallel('softmax', windows)


@pytest.mark.slow
@pytest.mark.parametrize('mechanism', sorted(path.stem for path in CONFIGS.glob('*.gin')))
def test_no_mechanism_exchanges_activations(mechanism):
    check_data_parallel(mechanism, 2)


def test_devices_that_share_matrices_gather_these_alone():
    found = collectives('softmax', train__tokens_per_step=4 * LENGTH, mesh__fsdp=4)
    gathered = [result for kind, result in found if kind == 'all-gather']
    assert gathered
    assert not [result for result in gathered if re.search(rf'\b{LENGTH}\b|\b{4 * LENGTH}\b', result)]


@pytest.mark.slow
def test_devices_that_share_windows_gather_their_own_windows_alone():
    """Keys and values, [windows, tokens, heads, numbers]; in a region where the split of the batch is left to the
    compiler, each device gathered the windows of all."""
    found = collectives('softmax', train__tokens_per_step=8 * LENGTH, mesh__sequence=2)
    gathered = {re.search(r'\[([\d,]+)\]', result)[1] for kind, result in found if kind == 'all-gather'}
    assert {shape for shape in gathered if shape.count(',') == 3} == {f'4,{LENGTH},4,64'}
