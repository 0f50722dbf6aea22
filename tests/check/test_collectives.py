"""The devices of a slice exchange gradients and shared matrices, and no activations, which belong to each device.

The tests read this from a training step compiled for the slice.
"""

import importlib.util

import pytest
import tiny

from lm.cost_model.collectives import Collective, collectives
from lm.cost_model.program import HloProgram
from lm.experiment import load
from lm.hardware import Target, describe_devices, parse
from lm.plan import plan_step
from lm.training.program import compile_described

pytestmark = pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='libtpu is not installed')
CONFIGS = tiny.ROOT / 'configs' / 'attention'
TOPOLOGY = 'v5e:2x2'
LENGTH = 1024
SMALL = {
    'model.n_layers': 4,  # the patterns of hybrids list four
    'model.d_model': 256,
    'model.n_heads': 4,
    'model.vocab_size': 1280,
    'model.remat': "'dots'",
    'train.context_length': LENGTH,
    'optimizer.warmup_steps': 1,
}


def exchanged(mechanism: str, **params) -> list[Collective]:
    """Returns the collectives of the program."""
    settings = SMALL | {name.replace('__', '.'): value for name, value in params.items()}
    experiment = load([str(CONFIGS / f'{mechanism}.gin')], [f'{name} = {value}' for name, value in settings.items()])
    topology = parse(TOPOLOGY)
    devices = describe_devices(topology)
    plan = plan_step(experiment, Target.of_devices(devices))
    text = compile_described(plan.program, plan.mesh.arrange(devices), topology).text
    return collectives(HloProgram(text))


def gathered(mechanism: str, **params) -> set[tuple[int, ...]]:
    """Returns the shapes of the arrays that a device gathers."""
    found = exchanged(mechanism, **params)
    return {shape for collective in found if collective.kind == 'all-gather' for shape in collective.shapes}


def check_data_parallel(mechanism: str, windows: int) -> None:
    found = exchanged(mechanism, train__tokens_per_step=4 * windows * LENGTH)
    assert {collective.kind for collective in found} == {'all-reduce'}, found


@pytest.mark.parametrize('windows', [pytest.param(1, marks=pytest.mark.slow), 2])
def test_devices_that_share_no_matrices_exchange_gradients_alone(windows):
    """On TPUs the model asks for layouts that are opaque to the partitioner of JAX 0.10. Each device then gathered all
    activations, in every layer. `windows` is the number per device."""
    check_data_parallel('softmax', windows)


@pytest.mark.slow
@pytest.mark.parametrize('mechanism', sorted(path.stem for path in CONFIGS.glob('*.gin')))
def test_no_mechanism_exchanges_activations(mechanism):
    check_data_parallel(mechanism, 2)


@pytest.mark.compiles
def test_devices_that_share_matrices_gather_these_alone():
    shapes = gathered('softmax', train__tokens_per_step=4 * LENGTH, mesh__fsdp=4)
    assert shapes
    assert not [shape for shape in shapes if {LENGTH, 4 * LENGTH} & set(shape)]


@pytest.mark.slow
def test_devices_that_share_windows_gather_their_own_windows_alone():
    """Keys and values are [windows, tokens, heads, numbers]. If the compiler decides how to split the batch in this
    region, each device gathers all windows."""
    shapes = gathered('softmax', train__tokens_per_step=8 * LENGTH, mesh__sequence=2)
    assert {shape for shape in shapes if len(shape) == 4} == {(4, LENGTH, 4, 64)}
