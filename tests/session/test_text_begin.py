"""Training and distillation from a model whose texts begin with a token of their own."""

import json
import shutil

import numpy as np
import pytest
import tiny

import lm
from lm.data.batches import Batches
from lm.errors import ConfigError
from lm.experiment import Experiment, load_of_run
from lm.plan import make_plan, settle_begin, validate
from lm.pod.mesh import batch_sharding
from lm.runs.run_dir import RunDir
from lm.session.start import settle_begun
from lm.training.objectives.next_token import next_token

BEGIN = 3
"""`<s>` of the tokenizer, which no text holds."""
SHORT = {'train.steps': 2, 'train.eval_every': None, 'optimizer.warmup_steps': 1, 'checkpoint.save_every_steps': 1}


@pytest.fixture(scope='module')
def origin(reference_run, tmp_path_factory):
    """Returns a run like an import of a model whose texts begin with a token."""
    run = tmp_path_factory.mktemp('origin') / 'run'
    shutil.copytree(reference_run[0], run)
    info = json.loads((run / 'run.json').read_text())
    (run / 'run.json').write_text(json.dumps(info | {'begin_id': BEGIN}))
    return str(run)


def configure(origin, **bindings) -> Experiment:
    """Returns the configuration of the origin, changed to a short run."""
    return load_of_run(origin, gin_params=[f'{name} = {value!r}' for name, value in (SHORT | bindings).items()])


def list_losses(run, name='loss') -> list[float]:
    lines = [json.loads(line) for line in (run / 'metrics.jsonl').read_text().splitlines()]
    return [line[name] for line in lines if line['kind'] == 'train']


def score_first_batch(origin, run, begin=None) -> float:
    """Returns the mean loss of the origin on the first batch of a run. `begin` is the first input of each window, and
    stands in place of the end-of-document tokens among the inputs."""
    loaded = lm.load(origin)
    plan = make_plan(load_of_run(str(run)))
    batches = Batches(plan.store, plan.split, plan.windows, 1, batch_sharding(loaded.mesh, axis=1))
    tokens = np.asarray(next(iter(batches.prefetch(0, 1))))[0].astype(np.int32)
    inputs = tokens[:, :-1].copy()
    if begin is not None:
        inputs[inputs == loaded.tokenizer.eod_id] = begin
        inputs[:, 0] = begin
    return float(loaded.functions.score_targets(loaded.weights, inputs, tokens[:, 1:]).nats.mean())


@pytest.fixture(scope='module')
def trained(origin, kept_programs, tmp_path_factory):
    """Returns a run of two steps from the weights of the origin."""
    run = tmp_path_factory.mktemp('trained') / 'run'
    lm.train(configure(origin, **{'train.init_from': origin}), str(run))
    return run


def test_a_run_begins_its_windows_like_the_model_that_it_starts_from(origin, trained):
    expected, without = score_first_batch(origin, trained, BEGIN), score_first_batch(origin, trained)
    assert list_losses(trained)[0] == pytest.approx(expected, rel=1e-5)
    assert abs(expected - without) > 0.01
    assert load_of_run(str(trained)).data.begin_id == BEGIN
    assert lm.load(str(trained)).begin_id == BEGIN
    lines = [json.loads(line) for line in (trained / 'metrics.jsonl').read_text().splitlines()]
    (stated,) = [line['conditioning'] for line in lines if line['kind'] == 'eval']
    assert (stated['before_texts'], stated['before_windows'], stated['token_id']) == ('begin', 'begin', BEGIN)


def test_a_resumed_run_gives_the_same_bits(origin, trained, kept_programs, tmp_path):
    again = tmp_path / 'run'
    shutil.copytree(trained, again)
    shutil.rmtree(again / 'checkpoints' / '2')
    (again / 'run.json').write_text((again / 'run.json').read_text().replace('"saved_step": 2', '"saved_step": 1'))
    lm.train(configure(origin, **{'train.init_from': origin}), str(again))
    assert list_losses(again) == list_losses(trained)
    assert tiny.checksums(again, 2) == tiny.checksums(trained, 2)


def make_student(origin, stage) -> Experiment:
    settings = [f'{name} = {value!r}' for name, value in SHORT.items()]
    settings += [f'train.objective = @{stage}()', f'{stage}.teacher = {origin!r}']
    return load_of_run(origin, gin_params=settings)


def test_student_and_teacher_see_the_token(origin, kept_programs, tmp_path):
    run = tmp_path / 'run'
    lm.train(make_student(origin, 'distill'), str(run))
    assert load_of_run(str(run)).data.begin_id == BEGIN
    expected = score_first_batch(origin, run, BEGIN)
    assert list_losses(run, 'teacher_cross_entropy')[0] == pytest.approx(expected, rel=1e-5)


def test_aligned_attention_sees_the_token(origin):
    student = settle_begin(make_student(origin, 'align'))
    tokens = np.array([[5, 1, 7, 8]], np.int32)
    inputs, targets, _ = make_plan(student).program.step.unpack(tokens)
    np.testing.assert_array_equal(inputs, [[BEGIN, BEGIN, 7]])
    np.testing.assert_array_equal(targets, tokens[:, 1:])


def test_a_run_that_has_begun_goes_on_as_it_began(origin, reference_run, tmp_path):
    new = RunDir(str(tmp_path / 'new'))
    given = configure(origin, **{'train.init_from': origin})
    assert settle_begun(given, new).data.begin_id == BEGIN
    assert settle_begun(given, RunDir(str(reference_run[0]))).data.begin_id is None
    assert settle_begun(given, new, str(reference_run[0])).data.begin_id is None
    begun = RunDir(str(tmp_path / 'begun'))
    begun.path.mkdir()
    begun.config.write_text(lm.dump(settle_begin(given)))
    assert settle_begun(configure(origin), begun).data.begin_id == BEGIN
    assert settle_begun(configure(origin, **{'data.begin_id': 5}), begun).data.begin_id == 5
    assert settle_begun(configure(origin), new, str(begun.path)).data.begin_id == BEGIN


def test_a_model_of_its_own_has_no_token(origin, tmp_path):
    for settings in ({}, {'train.init_from': str(tmp_path / 'gone')}, {'data.begin_id': 1, 'train.init_from': origin}):
        given = configure(origin, **settings)
        assert settle_begin(given) is given
    given = configure(origin)
    assert make_plan(given).program.step.unpack is next_token


def test_a_token_that_the_model_lacks_is_refused(origin):
    with pytest.raises(ConfigError, match=r'data\.begin_id = 400: must be a token of the model, which has 400'):
        validate(configure(origin, **{'data.begin_id': 400}))
