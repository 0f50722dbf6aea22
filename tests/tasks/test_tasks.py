"""Synthetic tasks: the papers' examples, loss and accuracy of the answers alone, and the usual trainer."""

import json
import pathlib
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import shipped
import tiny
from tiny import train_step

import lm.tasks
from lm import cli
from lm.attention.softmax import Softmax
from lm.config.configurable import REGISTRY
from lm.config.text import dump
from lm.data.dataset import DataConfig
from lm.errors import ConfigError
from lm.evaluation.accuracy import TaskEvaluator
from lm.evaluation.plan import TaskPlan
from lm.experiment import load
from lm.model import ModelConfig
from lm.pod.mesh import MeshConfig, make_mesh
from lm.tasks import Task, TaskStore
from lm.tasks.associative_recall import AssociativeRecall
from lm.tasks.draws import Draws
from lm.tasks.induction_heads import InductionHeads
from lm.tasks.selective_copying import SelectiveCopying
from lm.training.objectives.masked import Masked
from lm.training.optimizer import OptimizerConfig
from lm.training.step import TrainStep

TASKS = [InductionHeads(), SelectiveCopying(), AssociativeRecall(vocab_size=64, n_pairs=8)]
OTHERS = [
    cls()
    for cls in REGISTRY.values()
    if issubclass(cls, Task) and cls.generate is not Task.generate and not isinstance(cls(), tuple(map(type, TASKS)))
]
"""The other tasks whose examples need no files."""
BY_NAME = {'argvalues': TASKS, 'ids': lambda task: task.gin_name}

# ------------------------------------------------------------------------------------------------------------ examples


def test_induction_heads_follow_the_definition():
    tokens = InductionHeads().examples('train', range(2000), 128)
    assert tokens.shape == (2000, 129)
    places = []
    for row in tokens:
        first, second = np.flatnonzero(row == 16)  # exactly twice
        assert second == 127
        assert first <= 125
        assert row[128] == row[first + 1]
        places.append(first)
    assert np.bincount(tokens[:, 0])[:16].min() > 0
    assert (min(places), max(places)) == (0, 125)
    assert abs(np.mean(places) - 62.5) < 4  # uniform: the standard error is 0.8
    np.testing.assert_allclose(np.bincount(tokens[:, 128], minlength=16) / 2000, 1 / 16, atol=0.025)


def test_selective_copying_follows_the_definition():
    tokens = SelectiveCopying().examples('validation', range(500), 256)
    for row in tokens:
        (marker,) = np.flatnonzero(row == 15)
        assert marker == 256 - 16
        context, answer = row[:marker], row[marker + 1 :]
        assert answer.tolist() == context[context != 0].tolist()
        assert len(answer) == 16
    assert set(tokens[:, -1]) == set(range(1, 15))
    places = np.nonzero(tokens[:, :240])[1]
    assert abs(places.mean() - 119.5) < 4  # the standard error is 0.8


def test_associative_recall_follows_the_definition():
    task = AssociativeRecall(vocab_size=128, n_pairs=8, power=0.01)
    tokens = task.examples('train', range(1000), 63)
    slots = []
    for row in tokens:
        pairs = dict(zip(row[0:16:2].tolist(), row[1:16:2].tolist(), strict=True))
        assert len(pairs) == 8
        assert len(set(pairs.values())) == 8
        assert all(1 <= key < 64 <= value < 128 for key, value in pairs.items())
        questions = {}
        for position in range(16, 64, 2):
            if row[position]:
                questions[row[position]] = row[position + 1]
                slots.append((position - 16) // 2)
            else:
                assert row[position + 1] == 0
        assert questions == pairs
    # The queries follow a power law: the earliest slots come most often, the last slots least.
    counts = np.bincount(slots, minlength=24)
    assert counts[0] > 1.5 * counts[4] > 1.5 * counts[-1] > 0


def test_draws_without_replacement_follow_their_weights():
    draws = Draws(0, 'train', np.arange(20_000))
    drawn = draws.distinct(4, 2, np.array([1.0, 2.0, 3.0, 4.0]))
    np.testing.assert_allclose(np.bincount(drawn[:, 0]) / 20_000, [0.1, 0.2, 0.3, 0.4], atol=0.015)
    second = drawn[drawn[:, 0] == 3, 1]
    np.testing.assert_allclose(np.bincount(second) / len(second), [1 / 6, 2 / 6, 3 / 6], atol=0.02)


@pytest.mark.parametrize('task', TASKS + OTHERS, ids=lambda task: task.gin_name)
def test_examples_are_a_pure_function_of_seed_split_and_index(task):
    context = max(64, task.shortest_context())
    whole = task.examples('train', range(50), context)
    np.testing.assert_array_equal(task.examples('train', [41, 3], context), whole[[41, 3]])
    other = type(task)(**{**vars(task), 'seed': 1})
    for different in (task.examples('validation', range(50), context), other.examples('train', range(50), context)):
        assert (different != whole).any(axis=1).all()
    inputs, targets, scored = task.unpack(whole)
    assert inputs.shape == targets.shape == scored.shape == (50, context)
    assert np.asarray(scored).any(axis=1).all()
    assert 0 <= np.min(inputs) <= np.max(inputs) < task.vocab_size


def test_training_and_evaluation_sets_are_disjoint():
    task = InductionHeads()
    assert (task.count('train'), task.count('validation')) == (65_536, 4096)
    rows = {
        split: {r.tobytes() for r in task.examples(split, range(task.count(split)), 128)}
        for split in ('train', 'validation', 'test')
    }
    assert [len(found) for found in rows.values()] == [65_536, 4096, 4096]
    assert not rows['train'] & (rows['validation'] | rows['test'])
    assert not rows['validation'] & rows['test']


def test_the_store_serves_each_example_once_per_epoch():
    from lm.data.batches import Windows

    task = InductionHeads(train_examples=40)
    store = TaskStore(task, 16)
    windows = Windows(store.tokens('train'), 16, 8, seed=3)
    assert windows.count == 40
    served = np.concatenate([store.read_many('train', windows.starts(step), 17) for step in range(5)])
    expected = task.examples('train', range(40), 16)
    assert sorted(map(tuple, served.tolist())) == sorted(map(tuple, expected.tolist()))


# -------------------------------------------------------------------------------------------------- loss and accuracy


@pytest.mark.parametrize('task', **BY_NAME)
def test_only_answers_are_scored(task):
    tokens = task.examples('train', range(20), 64)
    scored = np.asarray(task.scored(tokens))
    assert scored.shape == (20, 64)
    expected = {'induction_heads': 1, 'selective_copying': 16, 'associative_recall': 8}[task.gin_name]
    assert (scored.sum(axis=1) == expected).all()
    if task.gin_name == 'associative_recall':
        assert (tokens[:, 1:][scored] >= 32).all()
    else:
        assert scored[:, -expected:].all()


def make_step(task) -> TrainStep:
    model = ModelConfig(vocab_size=64, n_layers=2, d_model=32, n_heads=2, head_dim=16, attention=Softmax())
    return train_step(model, OptimizerConfig(warmup_steps=1), 10, unpack=task.unpack)


def test_the_loss_is_the_mean_over_the_answers():
    task = TASKS[2]
    step = make_step(task)
    state = jax.jit(step.init)(0)
    tokens = task.examples('train', range(8), 64)
    nats = np.asarray(step.functions.score_targets(state, jnp.asarray(tokens[:, :-1]), jnp.asarray(tokens[:, 1:])).nats)
    train = jax.jit(step.train)
    _, whole = train(state, jnp.asarray(tokens[None]))
    assert float(whole['loss']) == pytest.approx(nats[np.asarray(task.scored(tokens))].mean(), rel=1e-5)
    _, parts = train(state, jnp.asarray(tokens.reshape(2, 4, 65)))
    for name in ('loss', 'grad_norm'):
        assert float(parts[name]) == pytest.approx(float(whole[name]), rel=1e-4)


@pytest.mark.parametrize('whole_answers', [True, False])
def test_accuracy_agrees_with_the_logits_of_the_model(whole_answers):

    # There are few values and random weights, so that the model is right now and then.
    task = AssociativeRecall(vocab_size=6, n_pairs=2, eval_examples=37)
    object.__setattr__(task, 'whole_answers', whole_answers)
    model = ModelConfig(vocab_size=6, n_layers=1, d_model=32, n_heads=2, head_dim=16, attention=Softmax())
    step = train_step(model, OptimizerConfig(warmup_steps=1), 10, unpack=task.unpack)
    state = jax.jit(step.init)(1)
    state['params'] = jax.tree.map(lambda x: x + jax.random.normal(jax.random.key(x.size), x.shape), state['params'])
    mesh = make_mesh(MeshConfig())
    evaluator = TaskEvaluator(step.functions, mesh, TaskPlan(task, 'validation', 12, 16))
    result = evaluator({name: state[name] for name in ('params', 'buffers')}, 7)

    tokens = task.examples('validation', range(37), 12)
    logits = np.asarray(step.functions.merge(state)(jnp.asarray(tokens[:, :-1])), np.float64)
    scored, targets = np.asarray(task.scored(tokens)), tokens[:, 1:]
    right = logits.argmax(-1) == targets
    by_example = np.array([r[s].all() for r, s in zip(right, scored, strict=True)])
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nats = -np.take_along_axis(log_p, targets[..., None], -1)[..., 0][scored]
    assert (result['examples'], result['answers'], result['step']) == (37, 74, 7)
    assert 0 < right[scored].mean() < 1
    assert result['accuracy_per_answer'] == pytest.approx(right[scored].mean())
    assert result['accuracy_per_example'] == pytest.approx(by_example.mean())
    assert result['accuracy'] == result['accuracy_per_example' if whole_answers else 'accuracy_per_answer']
    assert result['loss'] == pytest.approx(nats.mean(), rel=1e-5)
    assert f'accuracy {100 * result["accuracy"]:.2f} %' in evaluator.describe(result)


# ------------------------------------------------------------------------------------------------------- configuration


def test_impossible_tasks_are_refused_in_one_line():
    with pytest.raises(ConfigError, match=r'train.context_length = 20: @selective_copying\(\) needs at least 32'):
        TaskStore(SelectiveCopying(), 20)
    with pytest.raises(ConfigError, match=r'associative_recall.n_pairs = 8: must be below half of .*vocab_size = 16'):
        AssociativeRecall(vocab_size=16, n_pairs=8)
    with pytest.raises(ConfigError, match=r"split 'tests': @induction_heads\(\) has train, validation, test"):
        InductionHeads().count('tests')
    with pytest.raises(ConfigError, match=r"data.path = 'somewhere': a task needs no token store"):
        DataConfig(path='somewhere', task=InductionHeads()).open(128)
    for task in TASKS:
        shortest = task.shortest_context()
        assert np.asarray(task.scored(task.examples('train', range(3), shortest))).any(axis=1).all()


def test_the_fingerprint_depends_on_the_examples():
    same, other = TaskStore(InductionHeads(), 16).fingerprints, TaskStore(InductionHeads(seed=1), 16).fingerprints
    assert same == TaskStore(InductionHeads(), 16).fingerprints
    assert same != other
    assert same != TaskStore(InductionHeads(), 17).fingerprints


@pytest.mark.parametrize('name', ['induction_heads', 'selective_copying', 'associative_recall'])
def test_the_shipped_configurations_equal_the_papers(name):
    for mechanism in ('softmax', 'polynomial'):
        experiment = load([shipped.experiment(name), f'configs/attention/{mechanism}.gin'])
        model, train = experiment.model, experiment.train
        assert (model.n_layers, model.layer.n_heads, model.layer.head_dim, model.d_model) == (2, 8, 16, 128)
        assert train.batch_size == 64
        task = experiment.data.task
        assert task.gin_name == name
        assert task.vocab_size == model.vocab_size
        assert task.train_examples == 65_536
        assert task.examples('train', range(2), train.context_length).shape == (2, train.context_length + 1)
        assert load([], config_lines(experiment)) == experiment


def config_lines(experiment) -> list[str]:
    return [line for line in dump(experiment).splitlines() if line and not line.startswith('#')]


# ---------------------------------------------------------------------------------------------------------- whole runs

TINY = tiny.MODEL | {
    'data.task': '@associative_recall()',
    'associative_recall.vocab_size': 16,
    'associative_recall.n_pairs': 2,
    'associative_recall.eval_examples': 100,
    'model.vocab_size': 16,
    'train.steps': 60,
    'train.eval_every': 30,
    'train.context_length': 16,
    'train.tokens_per_step': 512,
    'evaluate.batch_size': 32,
    'checkpoint.save_every_steps': 10,
}


@pytest.mark.parametrize('name', ['induction_heads', 'selective_copying', 'associative_recall'])
def test_a_model_that_sees_later_tokens_sees_no_answer(name):
    """Other answers change no input, of the task and of hidden tokens. No answer is among the hidden tokens."""
    experiment = load([shipped.experiment(name)])
    task, length = experiment.data.task, experiment.train.context_length
    tokens = jnp.asarray(task.examples('train', range(2), length))
    scored = np.asarray(task.scored(tokens))
    others = np.asarray(tokens).copy()
    others[:, 1:][scored] = (others[:, 1:][scored] + 1) % task.vocab_size
    inputs, targets, counted = task.unpack_hidden(tokens)
    np.testing.assert_array_equal(counted, scored)
    np.testing.assert_array_equal(targets, tokens[:, 1:])
    np.testing.assert_array_equal(np.asarray(inputs)[:, 1:][scored[:, :-1]], 0)
    kept = ~np.pad(scored, ((0, 0), (1, 0)))[:, :-1]
    np.testing.assert_array_equal(np.asarray(inputs)[kept], np.asarray(tokens)[:, :-1][kept])
    hiding = Masked(share=0.5).unpack(TaskStore(task, length), task.vocab_size)
    shown, _, chosen = hiding(tokens, jnp.arange(2))
    again, _, same = hiding(jnp.asarray(others), jnp.arange(2))
    np.testing.assert_array_equal(shown, again)
    np.testing.assert_array_equal(chosen, same)
    assert 0.2 < np.asarray(chosen)[:, : 2 * length // 3].mean() < 0.6 or name == 'selective_copying'
    assert not np.asarray(chosen)[~kept].any()


@pytest.mark.slow  # two runs
def test_a_task_is_learned_from_both_sides_after_hidden_tokens(tmp_path):
    """The protocol of LLoPS Table 1: pre-training on the task's own tokens, then the task, both from both sides."""
    both = TINY | {
        'model.causal': False,
        'model.attention': '@softmax()',
        'train.steps': 30,
        'train.eval_every': None,
    }
    before, after = tmp_path / 'before', tmp_path / 'after'
    done = tiny.lm('train', '--run_dir', str(before), *tiny.params(both | {'train.objective': '@masked()'}))
    assert done.returncode == 0, done.stderr
    done = tiny.lm('train', '--run_dir', str(after), *tiny.params(both | {'train.init_from': str(before)}))
    assert done.returncode == 0, done.stderr
    assert 'accuracy' in done.stdout
    assert tiny.losses(before)[30] < tiny.losses(before)[1]
    assert tiny.losses(after)[30] < tiny.losses(after)[1]


@pytest.fixture(scope='module')
def task_run(tmp_path_factory) -> tuple[pathlib.Path, str]:
    run = tmp_path_factory.mktemp('tasks') / 'run'
    done = tiny.lm('train', '--run_dir', str(run), *tiny.params(TINY))
    assert done.returncode == 0, done.stderr
    return run, done.stdout


def test_a_task_trains_like_text(task_run):
    run, output = task_run
    assert 'epochs of @associative_recall()' in output
    assert 'accuracy' in output
    losses = tiny.losses(run)
    assert list(losses) == list(range(1, 61))
    assert losses[60] < losses[1] - 0.5
    evaluations = [json.loads(line) for line in (run / 'metrics.jsonl').read_text().splitlines() if '"eval"' in line]
    assert [e['step'] for e in evaluations] == [30, 60]
    for record in evaluations:
        assert 0 <= record['accuracy'] <= 1
        assert record['answers'] == 200
    info = json.loads((run / 'run.json').read_text())
    assert 'data' in info
    assert 'tokenizer' not in info


def test_a_killed_task_run_resumes_without_a_changed_bit(task_run, tmp_path):
    run = tmp_path / 'run'
    process = tiny.start('train', '--run_dir', str(run), *tiny.params(TINY))
    tiny.wait_for_step(run, 23, process)
    tiny.stop(process, signal.SIGKILL)
    done = tiny.lm('train', '--run_dir', str(run), *tiny.params(TINY))
    assert done.returncode == 0, done.stderr
    for kind in ('train', 'eval'):
        assert tiny.losses(run, kind) == tiny.losses(task_run[0], kind)
    assert tiny.checksums(run, 60) == tiny.checksums(task_run[0], 60)


def test_lm_evaluate_prints_the_accuracy(task_run):
    run, _ = task_run
    done = tiny.lm('evaluate', '--run_dir', str(run))
    assert done.returncode == 0, done.stderr
    last = json.loads((run / 'metrics.jsonl').read_text().splitlines()[-1])
    assert f'validation at step 60: accuracy {100 * last["accuracy"]:.2f} % of 200 answers' in done.stdout


def test_another_task_cannot_continue_a_run(task_run, capsys):
    other = tiny.params(TINY | {'associative_recall.n_pairs': 3})
    assert cli.main(['train', '--run_dir', str(task_run[0]), *other]) == 44
    assert 'associative_recall.n_pairs was 2, now 3' in capsys.readouterr().err
    assert cli.main(['generate', '--run_dir', str(task_run[0]), '--prompt', 'x']) == 2
    assert 'was trained on a task' in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------ learning

LEARNERS = {
    'softmax': {'model.attention': '@softmax()'},
    'polynomial 4': {'model.attention': '@polynomial()', 'polynomial.degree': 4},
    'polynomial 8': {'model.attention': '@polynomial()', 'polynomial.degree': 8},
    # Without exact blocks: otherwise a context of one block would be exact, and the sketch would not matter.
    'polysketch 16': {'model.attention': '@polysketch()', 'polysketch.sketch_size': 16, 'polysketch.local': False},
    'polysketch 32': {'model.attention': '@polysketch()', 'polysketch.sketch_size': 32, 'polysketch.local': False},
}


@pytest.mark.slow
@pytest.mark.parametrize('name', LEARNERS)
def test_two_layers_learn_induction_heads(name, tmp_path):
    """Context 32 comes first, then 128 from those weights: the commands are in induction_heads_start.gin."""
    start, run = str(tmp_path / 'start'), tmp_path / 'run'
    learner = tiny.params(LEARNERS[name])
    finish = {'train.init_from': start} | ({'train.steps': 1400} if name == 'polysketch 32' else {})
    stages = [('start', start, {}), ('finish', str(run), finish)]
    for stage, directory, bindings in stages:
        flags = ['--gin_file', shipped.experiment(f'induction_heads_{stage}'), *learner, *tiny.params(bindings)]
        done = tiny.lm('train', '--run_dir', directory, *flags, timeout=7200)
        assert done.returncode == 0, done.stderr
    last = json.loads((run / 'metrics.jsonl').read_text().splitlines()[-1])
    assert last['kind'] == 'eval'
    assert last['context_length'] == 128
    assert last['accuracy'] > 0.999


@pytest.mark.slow
def test_associative_recall_separates_the_mechanisms(tmp_path):
    """The order is LLoPS Table 4's; the commands are in associative_recall_start.gin."""
    accuracy = {}
    for mechanism in ('softmax', 'llops', 'taylor'):
        start, run = tmp_path / f'{mechanism}_start', tmp_path / mechanism
        for stage, directory, bindings in (('start', start, {}), ('finish', run, {'train.init_from': str(start)})):
            bindings = tiny.params({'recall': f'@{mechanism}()'} | bindings)
            flags = ['--gin_file', shipped.experiment(f'associative_recall_{stage}'), *bindings]
            done = tiny.lm('train', '--run_dir', str(directory), *flags, timeout=7200)
            assert done.returncode == 0, done.stderr
        accuracy[mechanism] = json.loads((run / 'metrics.jsonl').read_text().splitlines()[-1])['accuracy']
    assert accuracy['softmax'] > 0.999
    assert accuracy['llops'] > 0.999
    assert accuracy['taylor'] < 0.998


def test_a_new_task_file_is_found():
    """No other file names the task. It can be named in gin, and error messages list it."""
    files = {path.stem for path in pathlib.Path(lm.tasks.__file__).parent.rglob('*.py')}
    made = {cls.__module__.rpartition('.')[2] for cls in REGISTRY.values() if issubclass(cls, Task)}
    assert files - made == {'__init__', 'base', 'classification', 'draws', 'separate_answers'}
    names = [rf'@{name}\(\)' for name in sorted(cls.gin_name for cls in REGISTRY.values() if issubclass(cls, Task))]
    assert r'@arena_images\(\)' in names
    with pytest.raises(ConfigError, match=f'one of {", ".join(names)}'):
        DataConfig(task='induction_heads')
