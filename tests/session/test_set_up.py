"""The decisions of `lm train` before its first step. Nothing is compiled: a test ends as soon as it has its answer."""

import contextlib
import dataclasses
import json
import types

import pytest

from lm.attention.softmax import Softmax
from lm.config.configurable import REGISTRY
from lm.config.text import dump
from lm.data.dataset import DataConfig
from lm.evaluation.config import EvaluateConfig
from lm.experiment import Experiment
from lm.model import ModelConfig
from lm.model.functions import count_parameters
from lm.plan import make_plan, plan_step
from lm.pod.job import JobAddress
from lm.runs.goodput import Goodput
from lm.runs.run_dir import RunDir
from lm.session import start
from lm.session import train as train_module
from lm.session.start import Request
from lm.session.train import open_session, train, train_in_job
from lm.tasks.induction_heads import InductionHeads
from lm.training.config import TrainConfig
from lm.training.optimizer import OptimizerConfig

TASK = InductionHeads()
EXPERIMENT = Experiment(
    model=ModelConfig(vocab_size=32, n_layers=1, d_model=16, n_heads=1, head_dim=16, attention=Softmax()),
    data=DataConfig(task=TASK),
    optimizer=OptimizerConfig(warmup_steps=1),
    train=TrainConfig(steps=4, tokens_per_step=256, context_length=32),
    evaluate=EvaluateConfig(),
)


class Seen(Exception):
    """Raised once a test has seen the call that it waits for."""


@pytest.fixture
def until(monkeypatch):
    """Opens a session until it calls the named function of an owner; returns the arguments of that call."""

    def run(owner, name, **request):
        def see(*args, **kwargs):
            raise Seen(args, kwargs)

        monkeypatch.setattr(owner, name, see)
        with pytest.raises(Seen) as seen, open_session(EXPERIMENT, Request('unused', **request), 'none'):
            pass
        return seen.value.args

    return run


def test_a_run_of_an_older_version_keeps_its_program(tmp_path):
    """Its config.gin states the layers per turn of the loop over them, which others leave out."""
    old, new, young = (RunDir(str(tmp_path / name)) for name in ('old', 'new', 'young'))
    text = dump(EXPERIMENT)
    assert 'unroll' not in text
    for run, more in ((old, '\nmodel.unroll = 1\n'), (young, '')):
        run.path.mkdir()
        run.config.write_text(text + more)
    assert start.settle_begun(EXPERIMENT, old).model.unroll == 1
    assert start.settle_begun(EXPERIMENT, new, str(old.path)).model.unroll == 1
    given = dataclasses.replace(EXPERIMENT, model=dataclasses.replace(EXPERIMENT.model, unroll=2))
    assert start.settle_begun(given, old).model.unroll == 2
    assert start.settle_begun(EXPERIMENT, young) == start.settle_begun(EXPERIMENT, new) == EXPERIMENT


def test_only_the_answers_of_a_task_are_trained():
    plan = make_plan(EXPERIMENT)
    step = plan.program.step
    assert step.functions.config == EXPERIMENT.model
    assert (step.unpack, step.by_window, step.documents) == (TASK.unpack, False, None)
    assert (plan.program.batch_shape, plan.program.batch_dtype) == ((1, 8, 33), 'int32')


def test_the_plan_is_printed_before_any_work_begins(until, capsys):
    until(RunDir, 'lock')
    rows = {line[:17].strip(): line[17:] for line in capsys.readouterr().out.splitlines()}
    assert rows.keys() == {'parameters', 'tokens per step', 'tokens in total', 'FLOPs per token', 'devices'}
    assert rows['parameters'].endswith('(1 layer of width 16, softmax)')
    assert ' epochs of ' in rows['tokens in total']
    assert rows['devices'].startswith('8 × cpu (data 8, fsdp 1), 1 process, ')


@pytest.mark.parametrize('attention', ['polysketch', 'hybrid', 'window_linear'])
def test_a_note_says_that_an_exact_part_covers_the_context(attention):
    """The context has 32 tokens: the mechanism is no approximation there, and its cost is not linear."""
    mechanism = REGISTRY[attention]
    field = 'block' if attention == 'polysketch' else 'window'

    def describe(size: int) -> dict[str, str]:
        model = dataclasses.replace(EXPERIMENT.model, attention=mechanism(**{field: size}))
        return plan_step(dataclasses.replace(EXPERIMENT, model=model)).describe()

    assert describe(32)['note'].startswith(f'{attention}.{field} = 32: covers the context')
    assert 'note' not in describe(31)


@pytest.mark.parametrize(
    ('rewind_to', 'is_rewound', 'asked', 'rewinds'),
    [(None, True, [], False), (0, False, [0], True), (3, False, [3], True), (3, True, [3], False)],
)
def test_a_rewind_is_made_once(until, monkeypatch, capsys, rewind_to, is_rewound, asked, rewinds):
    questions, checked = [], []
    monkeypatch.setattr(RunDir, 'lock', lambda run: contextlib.nullcontext())
    monkeypatch.setattr(RunDir, 'is_rewound', lambda run, step, text: questions.append(step) or is_rewound)
    monkeypatch.setattr(RunDir, 'check_unchanged', lambda run, text, rewound: checked.append(rewound))
    monkeypatch.setattr(start, 'find_branch', lambda *_: None)
    made = []
    monkeypatch.setattr(train_module, 'Checkpointer', lambda *given: made.append(given) or Saved(*given))
    until(train_module, 'restore_or_init', rewind_to=rewind_to)
    ((folder, config, fingerprints, on_saved, measure, memory),) = made
    assert (questions, checked) == (asked, [rewinds])
    assert ('--rewind_to 3: done before' in capsys.readouterr().out) == (rewind_to == 3 and is_rewound)
    assert (folder, config) == (RunDir('unused').checkpoints, EXPERIMENT.checkpoint)
    assert on_saved.__func__ is RunDir.record_saved
    assert fingerprints
    assert isinstance(measure, str)
    assert memory is None


def test_processes_compare_their_starting_points(until, monkeypatch):
    """All processes ask the directory together. If they asked for different things, one process would wait for ever."""
    monkeypatch.setattr(RunDir, 'lock', lambda self: contextlib.nullcontext())
    (facts,), _ = until(start, 'check_same', rewind_to=3, branch_from='runs/a', step=7)
    assert facts == {'--rewind_to': 3, '--branch_from': 'runs/a', '--step': 7}


class Saved:
    """A checkpointer that has step 3 of a run, after 40 seconds of steps."""

    def __init__(self, folder, config, fingerprints, on_saved, measure, memory):
        self.rewound, self.stored = [], 3

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def restore(self, abstract, step):
        self.stored = step or 3
        return 'the state', step or 3, {'seconds': 50.0, 'step_seconds': 40.0, 'skipped_batches': [(1, 2)]}

    def latest_step(self):
        return 3

    def rewind(self, step):
        self.rewound.append(step)


@pytest.mark.parametrize('rewind_to', [None, 2])
def test_a_session_continues_from_the_restored_state(monkeypatch, tmp_path, capsys, rewind_to):
    lowered, compiled = types.SimpleNamespace(exception=lambda: None), types.SimpleNamespace(result=lambda: 'a program')
    monkeypatch.setattr(train_module, 'Checkpointer', Saved)
    monkeypatch.setattr(train_module, 'compile_in_background', lambda *_: (lowered, compiled))
    monkeypatch.setattr(RunDir, 'check_unchanged', lambda run, text, rewound: None)
    monkeypatch.setattr(RunDir, 'read_goodput', lambda run: Goodput(begun=None).record() | {'seconds': {'step': 100.0}})
    with open_session(EXPERIMENT, Request(str(tmp_path / 'run'), rewind_to), 'none') as trainer:
        pass
    computation, records, goodput = trainer.computation, trainer.records, trainer.services.goodput
    begin = rewind_to or 3
    assert (trainer.state, trainer.start, computation.advance) == ('the state', begin, 'a program')
    assert computation.batches.windows.batch(begin) == begin + 1  # one batch was left out before
    assert records.throughput.seconds >= 50
    assert (goodput.seconds['step'], goodput.seconds['lost']) == (40, 60)
    assert records.flops_per_token == EXPERIMENT.model.flops_per_token(32)
    assert records.peak_flops is None  # a CPU has no known peak
    assert records.text == dump(EXPERIMENT) == (tmp_path / 'run' / 'config.gin').read_text()
    assert trainer.checkpointer.rewound == ([] if rewind_to is None else [2])
    assert f'resumed from step {begin} of ' in capsys.readouterr().out
    assert json.loads((tmp_path / 'run' / 'run.json').read_text())['parameters'] == sum(
        count_parameters(EXPERIMENT.model).values()
    )


@pytest.fixture
def begin(monkeypatch):
    """Calls `train` until it opens the cache of compiled programs; returns its results so far."""

    def run(run_dir, **options):
        made = types.SimpleNamespace()

        def open_cache(folder):
            made.folder = folder and str(folder)
            raise Seen

        def make_ledger(*arguments):
            made.goodput = Goodput(*arguments)
            return made.goodput

        def make_request(*arguments):
            made.request = Request(*arguments)
            return made.request

        for name, make in (('CompileCache', open_cache), ('Goodput', make_ledger), ('Request', make_request)):
            monkeypatch.setattr(train_module, name, make)
        with pytest.raises(Seen):
            train(EXPERIMENT, run_dir, **options)
        return made

    return run


def test_the_folder_of_compiled_programs(begin, tmp_path):
    run = str(tmp_path / 'run')
    found = [begin(run, compile_cache=given).folder for given in (None, 'none', 'elsewhere')]
    assert found == [str(tmp_path / 'run' / 'compiled'), None, 'elsewhere']


def test_a_session_counts_from_the_start_of_its_process(begin, tmp_path, monkeypatch):
    monkeypatch.setattr(train_module.time, 'time', lambda: 5000.0)
    calls = [begin(str(tmp_path), rewind_to=7, begun=4000.0), begin(str(tmp_path))]
    assert [call.goodput.started for call in calls] == [4000.0, 5000.0]
    assert [call.request.rewind_to for call in calls] == [7, None]


def test_a_session_continues_the_ledger_of_the_previous_one(begin, monkeypatch):
    monkeypatch.setattr(RunDir, 'read_goodput', lambda run: Goodput(begun=1000.0).record())
    goodput = begin('unused').goodput
    assert (goodput.starts, goodput.started) == (2, 1000.0)


def test_a_job_is_joined_before_it_trains(monkeypatch):
    seen = []
    monkeypatch.setattr(train_module, 'initialize_distributed', lambda *arguments, meets: seen.append(arguments))
    monkeypatch.setattr(train_module, 'train', lambda *arguments: seen.append(arguments))
    monkeypatch.setattr(train_module, 'read_process_start', lambda: 3000.0)
    job = JobAddress('host:1', None, 0)
    train_in_job(EXPERIMENT, 'RUN', job, rewind_to=5, compile_cache='none', branch_from='OTHER', step=7)
    train_in_job(EXPERIMENT, 'RUN', job)  # as `lm sweep` calls it
    assert seen[0] == seen[2] == (EXPERIMENT.mesh, job)
    assert seen[1] == (EXPERIMENT, 'RUN', 5, 'none', 3000.0, 'OTHER', 7)
    assert seen[3] == (EXPERIMENT, 'RUN', None, None, 3000.0, None, None)
