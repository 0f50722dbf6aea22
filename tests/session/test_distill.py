"""`lm distill`: both stages as commands, from a trained teacher to a student; kills, and what is refused."""

import json
import shutil
import signal
import time

import grids
import numpy as np
import pytest
import tiny

import lm
from lm.data.batches import Batches
from lm.experiment import load_of_run
from lm.plan import make_plan
from lm.pod.mesh import batch_sharding

STUDENT = {
    'model.attention': '[@hedgehog(), @softmax()]',
    'train.steps': 20,
    'optimizer.warmup_steps': 2,
    'optimizer.peak_learning_rate': 1e-3,
    'checkpoint.save_every_steps': 5,
}


def distill(stage, teacher, run, *more, **bindings):
    given = tiny.params(STUDENT | bindings)
    return ['distill', '--stage', stage, '--teacher', str(teacher), '--run_dir', str(run), *more, *given]


@pytest.fixture(scope='module')
def stages(reference_run, tmp_path_factory):
    """Returns the runs of both stages, and their outputs."""
    teacher, folder = reference_run[0], tmp_path_factory.mktemp('stages')
    runs, outputs = {}, {}
    for stage, more in (('align', ()), ('distill', ('--init_from', str(folder / 'align')))):
        done = tiny.lm(*distill(stage, teacher, folder / stage, *more))
        assert done.returncode == 0, done.stderr
        runs[stage], outputs[stage] = folder / stage, done.stdout
    return runs, outputs


def test_a_student_starts_from_its_teacher_and_both_stages_come_nearer(stages):
    runs, outputs = stages
    assert 'teacher' in outputs['align']
    assert '19 of 21 arrays taken from the teacher; these not: blocks.0.attention.' in outputs['align']
    assert 'layers 0.' in outputs['align']
    assert 'behind' in outputs['distill']
    aligned = [json.loads(line) for line in (runs['align'] / 'metrics.jsonl').read_text().splitlines()]
    steps = [line for line in aligned if line['kind'] == 'train']
    assert steps[-1]['layer_error/00'] < steps[0]['layer_error/00']
    assert {line['layer_error/01'] for line in steps} == {0.0}
    told = [json.loads(line) for line in (runs['distill'] / 'metrics.jsonl').read_text().splitlines()]
    told = [line for line in told if line['kind'] == 'train']
    assert told[-1]['divergence'] < told[0]['divergence']


def test_the_teacher_in_a_step_is_the_model_that_lm_evaluate_scores(stages, reference_run):
    """A step of the validation text would need another program. The first training batch is scored here by the loaded
    run."""
    runs, _ = stages
    teacher = lm.load(str(reference_run[0]))
    plan = make_plan(load_of_run(str(runs['distill'])))
    batches = Batches(plan.store, plan.split, plan.windows, 1, batch_sharding(teacher.mesh, axis=1))
    tokens = np.asarray(next(iter(batches.prefetch(0, 1))))[0].astype(np.int32)
    scored = teacher.functions.score_targets(teacher.weights, tokens[:, :-1], tokens[:, 1:])
    line = json.loads((runs['distill'] / 'metrics.jsonl').read_text().splitlines()[0])
    assert line['step'] == 1
    np.testing.assert_allclose(line['teacher_cross_entropy'], scored.nats.mean(), rtol=1e-6)


@pytest.mark.parametrize('stage', grids.draw(['align', 'distill'], 1))
def test_a_killed_stage_resumes_without_a_changed_bit(stage, stages, reference_run, tmp_path):
    run, whole = tmp_path / stage, stages[0][stage]
    more = () if stage == 'align' else ('--init_from', str(stages[0]['align']))
    command = distill(stage, reference_run[0], run, *more)
    process = tiny.start(*command)
    while not (run / 'checkpoints' / '5').exists() and process.poll() is None:
        time.sleep(0.02)
    tiny.stop(process, signal.SIGKILL)
    done = tiny.lm(*command)
    assert done.returncode == 0, done.stderr
    assert 'resumed from step' in done.stdout
    assert tiny.losses(run) == tiny.losses(whole)
    assert tiny.checksums(run, 20) == tiny.checksums(whole, 20)


def test_a_student_does_not_go_on_with_another_teacher(stages, reference_run, tmp_path):
    teacher, run = tmp_path / 'teacher', tmp_path / 'run'
    shutil.copytree(reference_run[0], teacher)
    shutil.copytree(stages[0]['align'], run)
    text = (
        (run / 'config.gin')
        .read_text()
        .replace(str(reference_run[0]), str(teacher))
        .replace('steps = 20', 'steps = 30')
    )
    (run / 'config.gin').write_text(text)
    shutil.rmtree(max((teacher / 'checkpoints').iterdir(), key=lambda path: int(path.name)))
    done = tiny.lm('train', '--run_dir', str(run))
    assert done.returncode == 44
    assert 'teacher' in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ('bindings', 'words'),
    [
        ({'model.n_layers': 4}, ['has 2 layers', 'model.n_layers']),
        ({'model.vocab_size': 500}, ['model.vocab_size = 500', 'set it to 400']),
    ],
)
def test_models_that_cannot_be_compared_are_refused(reference_run, tmp_path, bindings, words):
    done = tiny.lm(*distill('distill', reference_run[0], tmp_path / 'run', **bindings))
    assert done.returncode == 2
    assert all(word in done.stderr for word in words), done.stderr
    assert not (tmp_path / 'run').exists()


def test_a_teacher_must_be_a_run(tmp_path):
    done = tiny.lm(*distill('align', tmp_path, tmp_path / 'run'))
    assert done.returncode == 2
    assert f'--teacher {tmp_path}: holds no config.gin' in done.stderr


def test_the_layers_that_recall_needs_most_stay_full(stages, reference_run, tmp_path):
    run = tmp_path / 'run'
    all_linear = {'model.attention': '@hedgehog()', 'train.context_length': 64}
    done = tiny.lm(*distill('align', reference_run[0], run, **all_linear))
    assert done.returncode == 0, done.stderr
    choice = ['distill', '--teacher', str(reference_run[0]), '--run_dir', str(run), '--choose']
    done = tiny.lm(*choice, '1')
    assert done.returncode == 0, done.stderr
    header, *rows, written = done.stdout.splitlines()
    assert header.split() == ['layer', 'loss', 'recall', 'score']
    assert sorted(row.split()[0] for row in rows) == ['0', '1']
    full = [int(row.split()[0]) for row in rows if row.endswith('stays full')]
    assert full == [int(rows[0].split()[0])]
    model = load_of_run(str(run), [str(run / 'pattern.gin')]).model
    assert [one.gin_name for one in model.pattern] == ['softmax' if i in full else 'hedgehog' for i in range(2)]
    assert str(run / 'pattern.gin') in written
    last = tmp_path / 'last'
    more = ('--init_from', str(run), '--gin_file', str(run / 'pattern.gin'))
    chosen = [*distill('distill', reference_run[0], last, *more)]
    chosen = chosen[: chosen.index('model.attention = [@hedgehog(), @softmax()]') - 1]
    done = tiny.lm(*chosen, *tiny.params({name: value for name, value in STUDENT.items() if name != 'model.attention'}))
    assert done.returncode == 0, done.stderr
    assert f'21 of 21 arrays taken from the teacher and {run}' in done.stdout
    for flag in (['--init_from', 'x'], ['--rewind_to', '7'], ['--gin_file', 'x.gin']):
        refused = tiny.lm(*choice, '1', *flag)
        assert refused.returncode == 2
        assert f'{" ".join(flag)}: is of a --stage' in refused.stderr
    told = tiny.lm(*choice[:-1], '--forecast')
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith('no needles: 64 tokens are too few for a needle')
    assert sorted(line.split()[0] for line in told.stdout.splitlines()[2:4]) == ['0', '1']
    assert 'no forecast: the teacher itself recalls less than 0.1' in told.stdout
    for more, why in ((['--choose', '1'], 'give one of them'), (['--rank_by', 'recall'], 'is of --choose')):
        refused = tiny.lm(*choice[:-1], '--forecast', *more)
        assert refused.returncode == 2
        assert why in refused.stderr
    moved = tiny.lm(*choice, '1', *tiny.params({'evaluate.split': 'no_such_split'}))
    assert 'no_such_split' in moved.stderr
    refused = tiny.lm(*choice, '3')
    assert refused.returncode == 2
    assert 'differs from the teacher in 2 layers only' in refused.stderr


def test_a_student_learns_from_cached_predictions(reference_run, tokens, tmp_path):
    """With all tokens of the vocabulary, the losses are the same as with a teacher in memory."""
    shutil.copytree(tokens, tmp_path / 'tokens')
    teacher, settings = reference_run[0], {'data.path': str(tmp_path / 'tokens'), 'train.steps': 4}
    found = {}
    for name, bindings in {'plain': {}, 'cached': {'distill.top_k': 400}}.items():
        command = distill('distill', teacher, tmp_path / name, **settings, **bindings)
        done = tiny.lm(*command)
        if bindings:
            assert done.returncode == 44
            assert 'run lm distill --cache 400 with the same settings' in done.stderr
            assert not (tmp_path / name / 'checkpoints').exists()
            cache = ['distill', '--cache', '400', '--teacher', str(teacher), *tiny.params(settings)]
            for _ in range(2):
                made = tiny.lm(*cache)
                assert made.returncode == 0, made.stderr
                assert 'train with --set distill.top_k=400' in made.stdout
            done = tiny.lm(*command)
        assert done.returncode == 0, done.stderr
        found[name] = tiny.losses(tmp_path / name)
    assert list(found['plain'].values()) == pytest.approx(list(found['cached'].values()), rel=1e-4)
    stale = distill(
        'distill', teacher, tmp_path / 'stale', **settings, **{'distill.top_k': 400, 'distill.teacher_step': 30}
    )
    done = tiny.lm(*stale)
    assert done.returncode == 44
    assert 'is of another teacher; run lm distill --cache 400' in done.stderr
    adapters = {'train.adapters': '@lora()', 'model.attention': '@softmax()', 'distill.top_k': 400}
    command = distill('distill', teacher, tmp_path / 'adapters', '--init_from', str(teacher), **settings | adapters)
    done = tiny.lm(*command)
    assert done.returncode == 0, done.stderr
    assert tiny.losses(tmp_path / 'adapters')[1] == pytest.approx(0, abs=1e-5), 'the student begins as its teacher'
