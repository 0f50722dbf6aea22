"""The training step as a program: refusals by compilers, and the messages about them."""

import math

import jax
import pytest

from lm.errors import ConfigError
from lm.experiment import load
from lm.hardware import Target, parse
from lm.plan import plan_step
from lm.training import program


@pytest.mark.parametrize(
    ('message', 'gib'),
    [
        ('RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO '
         'temporaries (28.01G) exceeds available HBM (15.75G). HLO module: jit_train.', 28.01),
        ('RESOURCE_EXHAUSTED: … on HBM, … temporaries (1.50T) exceeds available HBM (15.75G)', 1536),
        ('RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 512.0M of 15.75G hbm.', 0.5),
        ('RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm: too much', math.inf),
        ('RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 20.0M of 16.0M vmem.', None),
        ('INTERNAL: Mosaic failed to compile TPU kernel', None),
    ],
)  # fmt: skip
def test_needed_memory_is_read_from_the_compilers_message(message, gib):
    assert program.find_memory_needed(message) == gib


@pytest.mark.parametrize(
    ('message', 'gib', 'said'),
    [
        ('RESOURCE_EXHAUSTED: … on HBM, … temporaries (28.01G) exceeds available HBM (15.75G)', 28.01, None),
        ('INTERNAL: Mosaic failed to compile\nsecond line', None, 'v5e:1x1: .* training step: INTERNAL: .* compile$'),
    ],
)
def test_refused_steps_for_described_devices_give_memory_or_one_line(message, gib, said, monkeypatch):
    """The result is the memory that a step would need, or one line of the compiler's message, and never a traceback."""

    def refuse(lowered):
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(program, 'compile_with_text', refuse)
    shape = ['model.d_model = 16', 'model.n_layers = 1', 'model.n_heads = 1', 'model.vocab_size = 64']
    experiment = load([], [*shape, 'train.tokens_per_step = 64', 'train.context_length = 64'])
    devices = jax.devices()[:1]
    plan = plan_step(experiment, Target.of_devices(devices))
    arguments = plan.program, plan.mesh.arrange(devices), parse('v5e:1x1')
    if said is None:
        with pytest.raises(program.StepTooLarge) as refusal:
            program.compile_described(*arguments)
        assert refusal.value.needed_gib == gib
    else:
        with pytest.raises(ConfigError, match=said):
            program.compile_described(*arguments)
