"""Runs that train adapters: what they save, resume, refuse and give to evaluation, other runs and exports."""

import json
import shutil
import signal

import jax
import numpy as np
import pytest
import tiny

import lm
from lm.checkpoint.snapshot import flatten
from lm.training.first_weights import FirstWeights

BINDINGS = {
    'train.adapters': '@lora()',
    'lora.rank': 4,
    'train.steps': 20,
    'checkpoint.save_every_steps': 5,
    'optimizer.warmup_steps': 2,
    'optimizer.peak_learning_rate': 1e-2,
}


def train(flags, run, base, *more, **bindings):
    return [
        'train',
        '--run_dir',
        str(run),
        *flags,
        *tiny.params(BINDINGS | {'train.init_from': str(base)} | bindings),
        *more,
    ]


@pytest.fixture(scope='module')
def adapted_run(tiny_flags, reference_run, tmp_path_factory):
    """Returns (directory, output) of a run with adapters that was never stopped."""
    run = tmp_path_factory.mktemp('adapted') / 'run'
    done = tiny.lm(*train(tiny_flags, run, reference_run[0]))
    assert done.returncode == 0, done.stderr
    return run, done.stdout


def read_leaves(run, step=20):
    return json.loads((run / 'checkpoints' / str(step) / 'metadata' / 'metadata').read_text())


def test_a_checkpoint_holds_adapters_alone(adapted_run, reference_run):
    run, output = adapted_run
    assert 'adapters of rank 4 beside q, k, v, o' in output
    assert 'under adapters: ' in output
    record = read_leaves(run)
    names = [name for name in record['leaves'] if name.startswith('params.')]
    assert {name.rpartition('.')[2] for name in names} == {'down', 'up'}
    whole = sum(np.prod(leaf['shape']) for leaf in read_leaves(reference_run[0], 40)['leaves'].values())
    ours = sum(np.prod(leaf['shape']) for leaf in record['leaves'].values())
    assert ours < whole / 4
    assert set(record['fingerprints']) >= {'base', 'tokenizer', 'data'}
    losses = tiny.losses(run)
    assert losses[20] < losses[1]


def test_evaluation_and_generation_have_the_merged_weights(adapted_run, reference_run):
    run, base = lm.load(str(adapted_run[0])), lm.load(str(reference_run[0]))
    assert jax.tree.structure(run.weights) == jax.tree.structure(base.weights)
    ours, theirs = flatten(run.weights), flatten(base.weights)
    changed = {name for name in ours if (ours[name] != theirs[name]).any()}
    assert changed == {f'params.blocks.0.{part}.kernel' for part in ('qkv', 'attention_out')}
    lines = [json.loads(line) for line in (adapted_run[0] / 'metrics.jsonl').read_text().splitlines()]
    unmerged = next(line['loss'] for line in lines if line['kind'] == 'eval' and line['step'] == 20)
    done = tiny.lm('evaluate', '--run_dir', str(adapted_run[0]), '--json')
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(json.loads(done.stdout)['loss'], unmerged, rtol=1e-5)


def test_a_killed_run_goes_on_without_a_changed_bit(adapted_run, tiny_flags, reference_run, tmp_path):
    run = tmp_path / 'run'
    command = train(tiny_flags, run, reference_run[0])
    process = tiny.start(*command)
    tiny.wait_for_checkpoint(run, 5, process)
    tiny.stop(process, signal.SIGKILL)
    done = tiny.lm(*command)
    assert done.returncode == 0, done.stderr
    assert 'resumed from step' in done.stdout
    assert tiny.losses(run) == tiny.losses(adapted_run[0])
    assert tiny.checksums(run, 20) == tiny.checksums(adapted_run[0], 20)


def test_another_base_is_refused(adapted_run, tiny_flags, reference_run, tmp_path):
    base, run = tmp_path / 'base', tmp_path / 'run'
    shutil.copytree(reference_run[0], base)
    assert tiny.lm(*train(tiny_flags, run, base)).returncode == 0
    shutil.rmtree(base / 'checkpoints' / '40')
    for command in (train(tiny_flags, run, base), ['evaluate', '--run_dir', str(run)]):
        done = tiny.lm(*command)
        assert done.returncode == 44
        assert len(done.stderr.splitlines()) == 1
        assert 'base is ' in done.stderr
    shutil.rmtree(base)
    done = tiny.lm('generate', '--run_dir', str(run), '--prompt', 'x')
    assert done.returncode in (2, 44)
    assert len(done.stderr.splitlines()) == 1
    assert 'train.init_from' in done.stderr


@pytest.mark.parametrize(
    ('bindings', 'words'),
    [
        ({'train.init_from': None}, 'name a run in train.init_from'),
        ({'lora.targets': "['q', 'up', 'x']"}, 'lora.targets'),
        ({'model.n_kv_heads': 1}, 'give the model the sizes of that run'),
    ],
)
def test_what_adapters_cannot_stand_beside_is_refused(tiny_flags, reference_run, tmp_path, bindings, words):
    done = tiny.lm(*train(tiny_flags, tmp_path / 'run', reference_run[0], **bindings))
    assert done.returncode in (2, 44)
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / 'run' / 'checkpoints').exists()


def test_a_run_may_start_from_one_with_adapters(adapted_run, tiny_flags, tmp_path):
    """Its first loss is the loss of the merged model on the same batch."""
    run = tmp_path / 'run'
    bindings = {'train.init_from': str(adapted_run[0]), 'train.steps': 2, 'optimizer.warmup_steps': 1}
    done = tiny.lm('train', '--run_dir', str(run), *tiny_flags, *tiny.params(bindings))
    assert done.returncode == 0, done.stderr
    again = tmp_path / 'again'
    done = tiny.lm(*train(tiny_flags, again, adapted_run[0], **{'train.steps': 3}))
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(tiny.losses(run)[1], tiny.losses(again)[1], rtol=1e-5)
    # A checkpoint of adapters upon adapters is read, too.
    assert np.isfinite(lm.load(str(again)).score('some text').nats).all()


def test_an_export_holds_the_merged_weights_and_comes_back_equal(adapted_run, tmp_path):
    run, folder, back = adapted_run[0], tmp_path / 'out', tmp_path / 'back'
    for command in (
        ['export', '--run_dir', str(run), '--out', str(folder), '--format', 'safetensors'],
        ['import', str(folder), '--run_dir', str(back)],
    ):
        done = tiny.lm(*command)
        assert done.returncode == 0, done.stderr
    ours, theirs = flatten(lm.load(str(run)).weights), flatten(lm.load(str(back)).weights)
    assert ours.keys() == theirs.keys()
    for name, leaf in ours.items():
        np.testing.assert_array_equal(leaf, theirs[name])


def test_devices_share_the_base_and_the_adapters(adapted_run, tiny_flags, reference_run, tmp_path):
    """Shards and microbatches change nothing but rounding; one device evaluates what four have trained."""
    run = tmp_path / 'run'
    bindings = {'mesh.fsdp': 2, 'train.microbatches': 2, 'train.steps': 6, 'model.remat': 'dots'}
    done = tiny.lm(*train(tiny_flags, run, reference_run[0], **bindings), devices=4)
    assert done.returncode == 0, done.stderr
    ours, whole = tiny.losses(run), tiny.losses(adapted_run[0])
    np.testing.assert_allclose([ours[i] for i in range(1, 5)], [whole[i] for i in range(1, 5)], rtol=2e-3)
    assert lm.load(str(run)).step == 6


def test_a_student_learns_by_adapters_and_keeps_its_base(reference_run, tmp_path):
    """Stage 2 as in LoLCATs: the base is of the teacher and of stage 1, whose pattern of layers is another one."""
    options = {'train.steps': 8, 'optimizer.warmup_steps': 1, 'checkpoint.save_every_steps': 4}
    stages = {
        'align': ({'model.attention': '@hedgehog()'}, []),
        'distill': (
            {'model.attention': '[@hedgehog(), @softmax()]', 'train.adapters': '@lora()'},
            ['--init_from', str(tmp_path / 'align')],
        ),
    }
    for stage, (bindings, more) in stages.items():
        command = ['distill', '--stage', stage, '--teacher', str(reference_run[0]), '--run_dir', str(tmp_path / stage)]
        done = tiny.lm(*command, *more, *tiny.params(options | bindings))
        assert done.returncode == 0, done.stderr
    assert 'under adapters: 21 of 21 arrays taken from the teacher and ' in done.stdout
    record = read_leaves(tmp_path / 'distill', 8)
    assert set(record['fingerprints']) >= {'teacher', 'base'}
    assert not [name for name in record['leaves'] if 'kernel' in name or 'embedding' in name]
    student, aligned = lm.load(str(tmp_path / 'distill')), lm.load(str(tmp_path / 'align'))
    ours, theirs = student.weights['params']['blocks'], aligned.weights['params']['blocks']
    maps, taught = flatten(ours[0]['attention']), flatten(theirs[0]['attention'])
    assert maps.keys() == taught.keys()
    for name, leaf in maps.items():
        np.testing.assert_array_equal(leaf[0], taught[name][0])
    shutil.copytree(tmp_path / 'distill', tmp_path / 'again')
    shutil.rmtree(tmp_path / 'again' / 'checkpoints' / '8')
    done = tiny.lm(*command[:-1], str(tmp_path / 'again'), *more, *tiny.params(options | bindings))
    assert done.returncode == 0, done.stderr
    assert tiny.checksums(tmp_path / 'again', 8) == tiny.checksums(tmp_path / 'distill', 8)


def test_aligning_with_adapters_is_refused(reference_run, tmp_path):
    command = ['distill', '--stage', 'align', '--teacher', str(reference_run[0]), '--run_dir', str(tmp_path / 'run')]
    done = tiny.lm(*command, *tiny.params({'train.adapters': '@lora()', 'model.attention': '@hedgehog()'}))
    assert done.returncode == 2
    assert 'take adapters for the stage distill' in done.stderr


def test_adapters_are_merged_into_the_only_copy_of_the_base(adapted_run, monkeypatch):
    """The base gives its memory away, and no parameters are drawn beside it."""
    bases, drawn = [], []
    make_base, take = FirstWeights.make_base, FirstWeights.take

    def keep(first, mesh, teacher):
        bases.append(make_base(first, mesh, teacher))
        return bases[-1]

    def look(first, given, abstract, teacher):
        drawn.extend(jax.tree.leaves(given['params']))
        return take(first, given, abstract, teacher)

    monkeypatch.setattr(FirstWeights, 'make_base', keep)
    monkeypatch.setattr(FirstWeights, 'take', look)
    run = lm.load(str(adapted_run[0]))
    ((base, _),) = bases
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(base['params']))
    assert not any(isinstance(leaf, jax.Array) for leaf in drawn)
    assert np.isfinite(run.score('x').nats).all()
