"""The plan of a run: its contents; it touches no device; a series of plans repeats no work."""

import dataclasses
import subprocess
import sys

import jax
import numpy as np
import pytest
import tiny

from lm.data.dataset import DataConfig
from lm.errors import AbsentError, ConfigError
from lm.evaluation.plan import TaskPlan, TextPlan
from lm.experiment import load
from lm.hardware import Target
from lm.model.functions import ModelFunctions
from lm.plan import PlanCache, make_plan, plan_step, validate
from lm.pod.mesh import MeshShape

SETTINGS = tiny.MODEL | {'model.n_layers': 1}


@pytest.fixture
def experiment(tokens):
    return load((), tiny.params(SETTINGS | {'data.path': str(tokens)})[1::2])


def test_a_plan_says_what_a_run_will_do(experiment):
    plan = make_plan(experiment, Target('tpu', (4, 4)))
    assert plan.mesh == MeshShape(data=8, fsdp=1, sequence=1, slices=2)
    assert plan.functions.dtype == 'bfloat16'
    assert (plan.program.batch_shape, plan.program.batch_dtype) == ((1, 8, 33), np.uint16)
    assert (plan.split, plan.windows.batch_size) == ('train', 8)
    assert isinstance(plan.evaluation, TextPlan)
    assert (plan.evaluation.parts[''].split, plan.evaluation.parts[''].windows.context_length) == ('validation', 32)
    assert plan.first.initial is None
    assert make_plan(experiment).functions.dtype == 'float32'  # the plan does not know the devices


@pytest.mark.parametrize(
    ('changes', 'field'),
    [
        (
            {'model.vocab_size': 2**31 - 1},
            r'model.vocab_size = 2147483647, .* the parameter embedding.embedding would have',
        ),
        ({'model.d_model': 10**6}, r'model.d_model = 1000000, .* is the most on a device \(mesh.fsdp = 1\); make'),
        ({'model.n_layers': 10**6, 'model.d_model': 1024}, 'model.n_layers = 1000000: the parameter blocks'),
        (
            {'model.vocab_size': 10**7},
            'mesh.fsdp = 1: parameters and optimizer take 3.6 GiB on each device, which has 1.0',
        ),
        ({'evaluate.batch_size': 10**9}, 'evaluate.batch_size = 1000000000: the activations of one layer take'),
        ({'train.tokens_per_step': 32 * 2**20, 'train.microbatches': 1}, 'train.tokens_per_step = 33554432: the activ'),
    ],
)
def test_what_surely_does_not_fit_is_refused_before_the_start(changes, field, tokens):
    target = Target('cpu', (1,), memory=2**30)
    small = load((), tiny.params(SETTINGS | {'data.path': str(tokens)})[1::2])
    assert make_plan(small, target).target is target
    large = load((), tiny.params(SETTINGS | {'data.path': str(tokens)} | changes)[1::2])
    with pytest.raises(ConfigError, match=field):
        make_plan(large, target)


def test_a_step_is_planned_without_data(experiment):
    """This step equals the step of the run, except that the type of its tokens is guessed."""
    elsewhere = dataclasses.replace(experiment, data=DataConfig(path='nowhere'))
    plan = plan_step(elsewhere, Target('tpu', (4, 4)))
    assert (plan.mesh, plan.functions.dtype) == (MeshShape(8, 1, 1, 2), 'bfloat16')
    assert (plan.program.batch_shape, plan.program.batch_dtype) == ((1, 8, 33), np.uint16)


def test_devices_are_described_as_jax_and_topologies_have_them():
    assert dataclasses.replace(Target.of_devices(jax.devices()), memory=None) == Target('cpu', (8,))
    assert Target('tpu', (8, 8)).devices == 16


def test_a_task_is_evaluated_on_examples():
    names = {'data.task': '@induction_heads()', 'model.vocab_size': 32, 'train.context_length': 64}
    plan = make_plan(load((), tiny.params(SETTINGS | names)[1::2]))
    assert plan.evaluation == TaskPlan(plan.experiment.data.task, 'validation', 64, 16)
    assert plan.program.batch_dtype == np.int32


def test_many_plans_open_and_build_nothing_twice(experiment, monkeypatch):
    opened, built, plain, make = [], [], DataConfig.open, ModelFunctions.__init__
    monkeypatch.setattr(DataConfig, 'open', lambda *given: opened.append(given) or plain(*given))
    monkeypatch.setattr(ModelFunctions, '__init__', lambda *given: built.append(given) or make(*given))
    cache = PlanCache()
    for seed in range(5):
        train = dataclasses.replace(experiment.train, seed=seed)
        assert validate(dataclasses.replace(experiment, train=train), cache=cache) == []
    assert (len(opened), len(built)) == (1, 1)


def test_absent_data_are_looked_for_once(experiment, monkeypatch):
    def refuse(*_):
        looked.append(1)
        raise AbsentError('data.path: nothing is there')

    looked = []
    monkeypatch.setattr(DataConfig, 'open', refuse)
    cache = PlanCache()
    for _ in range(3):
        assert validate(experiment, cache=cache) == ['data.path: nothing is there']
    assert looked == [1]
    with pytest.raises(AbsentError):
        make_plan(experiment)


def test_settings_are_refused_before_data_are_looked_for(experiment):
    wrong = dataclasses.replace(experiment, data=DataConfig(path='nowhere'))
    wrong = dataclasses.replace(wrong, optimizer=dataclasses.replace(wrong.optimizer, warmup_steps=100))
    with pytest.raises(ConfigError, match=r'optimizer\.warmup_steps = 100'):
        make_plan(wrong)


def test_no_plan_touches_a_device(tokens):
    """The test uses its own process, and mechanisms that draw, fit and compute while they are built."""
    program = (
        'from jax._src import xla_bridge\nfrom lm.experiment import load\nfrom lm.plan import make_plan\n'
        'for name in ("softmax", "polysketch", "performer", "hybrid", "delta"):\n'
        f'    settings = {tiny.params(SETTINGS | {"data.path": str(tokens)})[1::2]!r}\n'
        '    make_plan(load((), [*settings, f"model.attention = @{name}()"]))\n'
        '    assert not xla_bridge.backends_are_initialized(), name\n'
    )
    done = subprocess.run([sys.executable, '-c', program], env=tiny.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
