"""Each level of `model.remat` recomputes the kernels that it names, in the step compiled for a TPU."""

import collections
import importlib.util
import re

import jax
import numpy as np
import pytest
from tiny import train_step

from lm.attention import mechanisms
from lm.hardware import describe_devices, parse
from lm.model import REMAT, ModelConfig
from lm.pod.mesh import MeshConfig, make_mesh
from lm.training.config import TrainConfig
from lm.training.optimizer import OptimizerConfig
from lm.training.program import StepProgram, lower_step

pytestmark = pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='libtpu is not installed')
MECHANISMS = {'performer': dict(n_features=64), 'softmax': {}, 'polynomial': {}, 'polysketch': dict(block=128)}
FORWARD = {'none': 1, 'dots': 1, 'dense': 2, 'attention': 1, 'full': 2}


def kernels(name: str, remat: str) -> dict[str, int]:
    """Returns kernel → its calls in a layer's forward and backward pass."""
    mesh = make_mesh(MeshConfig(), describe_devices(parse('v5e:1x1')))
    model = ModelConfig(
        vocab_size=256,
        n_layers=2,
        d_model=64,
        n_heads=1,
        attention=mechanisms()[name](**MECHANISMS[name]),
        remat=remat,
        unroll=1,  # the text has each kernel of a layer once
    )
    step = train_step(model, OptimizerConfig(warmup_steps=1), 10, platform='tpu')
    config = TrainConfig(tokens_per_step=512, context_length=512)
    with jax.set_mesh(mesh):
        lowered = lower_step(StepProgram(step, config.batch_shape, np.dtype('uint16')), mesh)
        text = lowered.compile().as_text()
    names = re.findall(r'%(\w+?)[.\d]* = [^=]*custom-call\([^\n]*"tpu_custom_call"', text)
    kinds = ('forward' if re.search('forward|fwd', name) else 'backward' for name in names)
    return collections.Counter(
        f'rotary {kind}' if 'rotary' in name else kind for name, kind in zip(names, kinds, strict=True)
    )


def check_calls(name: str, remat: str) -> None:
    nodes = 2 if name == 'polysketch' else 0  # the networks of queries and keys
    # The step keeps the product of a projection, which the projection writes in place. A rotated copy costs more than a
    # second rotation.
    rotary = {'rotary forward': 1 if remat == 'none' else 2, 'rotary backward': 1}
    assert kernels(name, remat) == {'forward': (1 + nodes) * FORWARD[remat], 'backward': 1 + nodes} | rotary


@pytest.mark.compiles
@pytest.mark.parametrize('remat', ['dots', 'dense'])
def test_named_results_of_kernels_are_kept(remat):
    """`dense` keeps products alone, so the kernel runs again."""
    check_calls('performer', remat)


@pytest.mark.slow
@pytest.mark.parametrize('name', MECHANISMS)
@pytest.mark.parametrize('remat', REMAT)
def test_every_kernel_runs_as_often_as_its_level_says(name, remat):
    check_calls(name, remat)
