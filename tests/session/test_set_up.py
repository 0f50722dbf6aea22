"""What `lm train` decides before its first step: nothing is compiled, a test ends where its question is answered."""

import contextlib
import json
import types

import pytest

from lm import experiment as experiment_module
from lm.attention.softmax import Softmax
from lm.compilation.cache import CompileCache
from lm.config.text import dump
from lm.data.dataset import DataConfig
from lm.evaluation.config import EvaluateConfig
from lm.experiment import Experiment, training_step
from lm.model import ModelConfig
from lm.runs.goodput import Goodput
from lm.runs.run_dir import RunDir
from lm.session import train as train_module
from lm.session.train import set_up, train, train_in_job
from lm.tasks.induction_heads import InductionHeads
from lm.training.config import TrainConfig
from lm.training.mesh import JobAddress
from lm.training.optimizer import OptimizerConfig
from lm.training.step import count_parameters

TASK = InductionHeads()
EXPERIMENT = Experiment(
    model=ModelConfig(vocab_size=32, n_layers=1, d_model=16, n_heads=1, head_dim=16, attention=Softmax()),
    data=DataConfig(task=TASK),
    optimizer=OptimizerConfig(warmup_steps=1),
    train=TrainConfig(steps=4, tokens_per_step=256, context_length=32),
    evaluate=EvaluateConfig(),
)


class Seen(Exception):
    """What was asked for has been seen."""


@pytest.fixture
def until(monkeypatch):
    """Runs `set_up` until it calls the named thing; returns that call's arguments."""

    def run(name, *arguments, **options):
        def see(*args, **kwargs):
            raise Seen(args, kwargs)

        monkeypatch.setattr(train_module, name, see)
        with contextlib.ExitStack() as stack, pytest.raises(Seen) as seen:
            set_up(EXPERIMENT, 'unused', stack, Goodput(begun=None), CompileCache(None), *arguments, **options)
        return seen.value.args

    return run


def test_only_the_answers_of_a_task_are_learned(until, monkeypatch):
    (experiment, store), _ = until('training_step')
    assert experiment == EXPERIMENT
    monkeypatch.setattr(experiment_module, 'TrainStep', lambda *given: given)
    by_window, documents = False, None
    given = training_step(experiment, store)
    assert given == (EXPERIMENT.model, EXPERIMENT.optimizer, 4, TASK.unpack, by_window, documents)


def test_the_plan_is_printed_before_anything_is_touched(until, capsys):
    (path,), _ = until('RunDir')
    assert path == 'unused'
    rows = {line[:17].strip(): line[17:] for line in capsys.readouterr().out.splitlines()}
    assert rows.keys() == {'parameters', 'tokens per step', 'tokens in total', 'FLOPs per token', 'devices'}
    assert rows['parameters'].endswith('(1 layer of width 16, softmax)')
    assert ' epochs of ' in rows['tokens in total']
    assert rows['devices'].startswith('8 × cpu (data 8, fsdp 1), 1 process, ')


@pytest.mark.parametrize(
    ('rewind_to', 'is_rewound', 'asked', 'rewinds'),
    [(None, True, [], False), (0, False, [0], True), (3, False, [3], True), (3, True, [3], False)],
)
def test_a_rewind_is_made_once(until, monkeypatch, capsys, rewind_to, is_rewound, asked, rewinds):
    questions, checked = [], []

    @contextlib.contextmanager
    def lock():
        yield

    run = types.SimpleNamespace(
        lock=lock,
        is_rewound=lambda step, experiment: questions.append(step) or is_rewound,
        check_unchanged=lambda experiment, rewound: checked.append(rewound),
        checkpoints='folder',
        record_saved=print,
    )
    monkeypatch.setattr(train_module, 'RunDir', lambda path: run)
    monkeypatch.setattr(train_module, 'find_branch', lambda *_: None)
    (folder, config, fingerprints, on_saved, measure), _ = until('Checkpointer', rewind_to)
    assert (questions, checked) == (asked, [rewinds])
    assert ('--rewind_to 3: done before' in capsys.readouterr().out) == (rewind_to == 3 and is_rewound)
    assert (folder, config, on_saved) == ('folder', EXPERIMENT.checkpoint, print)
    assert fingerprints
    assert isinstance(measure, str)


def test_processes_compare_what_the_run_goes_on_from(until, monkeypatch):
    """It is asked of the directory together: of processes that ask for different things, one would wait for ever."""
    monkeypatch.setattr(RunDir, 'lock', lambda self: contextlib.nullcontext())
    (facts,), _ = until('check_same', 3, 'runs/a', 7)
    assert facts == {'--rewind_to': 3, '--branch_from': 'runs/a', '--step': 7}


class Saved:
    """A checkpointer that has step 3 of a run, after 40 seconds of steps."""

    def __init__(self, folder, config, fingerprints, on_saved, measure):
        self.rewound = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def restore(self, abstract, step):
        return 'the state', step or 3, {'seconds': 50.0, 'step_seconds': 40.0, 'skipped_batches': [(1, 2)]}

    def latest_step(self):
        return 3

    def rewind(self, step):
        self.rewound.append(step)


@pytest.mark.parametrize('rewind_to', [None, 2])
def test_what_a_session_goes_on_with(monkeypatch, tmp_path, capsys, rewind_to):
    futures = types.SimpleNamespace(exception=lambda: None), types.SimpleNamespace(result=lambda: 'the program')
    monkeypatch.setattr(train_module, 'Checkpointer', Saved)
    monkeypatch.setattr(train_module, 'compile_step_aside', lambda *_: futures)
    monkeypatch.setattr(RunDir, 'check_unchanged', lambda run, experiment, rewound: None)
    goodput = Goodput(begun=None)
    goodput.seconds['step'] = 100.0
    with contextlib.ExitStack() as stack:
        trainer = set_up(EXPERIMENT, str(tmp_path / 'run'), stack, goodput, CompileCache(None), rewind_to)
    start = rewind_to or 3
    assert (trainer.state, trainer.start, trainer.advance) == ('the state', start, 'the program')
    assert trainer.batches.windows.batch(start) == start + 1  # one was left out before
    assert trainer.throughput.seconds >= 50
    assert (goodput.seconds['step'], goodput.seconds['lost']) == (40, 60)
    assert trainer.flops_per_token == EXPERIMENT.model.flops_per_token(32)
    assert trainer.peak_flops is None  # of a CPU
    assert trainer.text == dump(EXPERIMENT) == (tmp_path / 'run' / 'config.gin').read_text()
    assert trainer.checkpointer.rewound == ([] if rewind_to is None else [2])
    assert f'resumed from step {start} of ' in capsys.readouterr().out
    assert json.loads((tmp_path / 'run' / 'run.json').read_text())['parameters'] == sum(
        count_parameters(EXPERIMENT.model).values()
    )


@pytest.fixture
def started(monkeypatch):
    """What `train` makes a Trainer of; it is not run."""
    calls = []

    def stub(experiment, run_dir, stack, goodput, programs, rewind_to, branch_from, step):
        calls.append(types.SimpleNamespace(run_dir=run_dir, goodput=goodput, programs=programs, rewind_to=rewind_to))
        return types.SimpleNamespace(run=lambda: 'the state')

    class Cache(contextlib.nullcontext):
        def __init__(self, folder):
            super().__init__(folder and str(folder))

    monkeypatch.setattr(train_module, 'set_up', stub)
    monkeypatch.setattr(train_module, 'CompileCache', Cache)
    return calls


def test_where_compiled_programs_are_kept(started, tmp_path):
    run = str(tmp_path / 'run')
    for compile_cache in (None, 'none', 'elsewhere'):
        assert train(EXPERIMENT, run, compile_cache=compile_cache) == 'the state'
    assert [call.programs for call in started] == [str(tmp_path / 'run' / 'compiled'), None, 'elsewhere']


def test_since_when_a_session_counts(started, tmp_path, monkeypatch):
    monkeypatch.setattr(train_module.time, 'time', lambda: 5000.0)
    train(EXPERIMENT, str(tmp_path), rewind_to=7, begun=4000.0)
    train(EXPERIMENT, str(tmp_path))
    assert [call.goodput.started for call in started] == [4000.0, 5000.0]
    assert [call.rewind_to for call in started] == [7, None]


def test_a_session_goes_on_with_the_ledger_of_the_one_before(started, monkeypatch):
    monkeypatch.setattr(RunDir, 'read_goodput', lambda run: Goodput(begun=1000.0).record())
    train(EXPERIMENT, 'unused')
    assert (started[0].goodput.starts, started[0].goodput.started) == (2, 1000.0)


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
