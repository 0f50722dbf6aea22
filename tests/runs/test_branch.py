"""`lm train --branch_from`: a new run continues from a checkpoint of another run; without changes, to the bit."""

import json
import shutil

import pytest
import tiny

import lm
from lm import cli
from lm.runs.records import Run

pytestmark = pytest.mark.usefixtures('kept_programs')


def branch(reference_run, run, *extra, step=30, **bindings) -> int:
    names = {name.replace('__', '.'): value for name, value in bindings.items()}
    source = ['--branch_from', str(reference_run[0]), '--step', str(step)]
    return cli.main(['train', '--run_dir', str(run), *source, *tiny.params(names), *extra])


def test_an_unchanged_branch_equals_the_run_that_went_on(reference_run, tmp_path, capsys):
    parent, run = reference_run[0], tmp_path / 'run'
    done = tiny.lm('train', '--run_dir', str(run), '--branch_from', str(parent), '--step', '30')
    assert done.returncode == 0, done.stderr
    assert f'resumed from step 30 of {parent}' in done.stdout
    assert tiny.checksums(run, 40) == tiny.checksums(parent, 40)
    for kind in ('train', 'eval'):
        assert tiny.losses(run, kind) == tiny.losses(parent, kind)
    recorded = json.loads((run / 'run.json').read_text())['branch']
    assert recorded == {'from': str(parent), 'step': 30, 'changed': []}
    assert len(Run.read(run).speeds) == 9, 'the speed of the other run is not its own'

    assert branch(reference_run, run) == 0
    assert f'resumed from step 40 of {run}' in capsys.readouterr().out
    assert cli.main(['inspect', str(run)]) == 0
    assert f'{parent} at step 30' in ''.join(capsys.readouterr().out.split('\n')).replace('  ', '')


def test_a_branch_decays_and_goes_on_from_the_other_run_until_it_has_a_checkpoint(reference_run, tmp_path, capsys):
    run = tmp_path / 'run'
    changes = {'train__steps': 34, 'optimizer__schedule': '@wsd()', 'wsd__decay_share': 4 / 29}
    assert branch(reference_run, run, **changes) == 0
    rates = {r['step']: r['learning_rate'] for r in Run.read(run).train}
    assert list(rates) == list(range(1, 35)), 'the past is there, each step once'
    assert [rates[step] for step in range(31, 35)] == pytest.approx([3e-3, 2.25e-3, 1.5e-3, 0.75e-3])
    assert rates[30] < 1.3e-3, 'the other run had a linear schedule'
    info = json.loads((run / 'run.json').read_text())
    changed = {name: (old, new) for name, old, new in info['branch']['changed']}
    assert changed['train.steps'] == ('40', '34')
    assert changed['optimizer.schedule'] == ('@linear()', '@wsd()')
    assert sorted(path.name for path in (run / 'checkpoints').iterdir()) == ['30', '34']

    # The directory looks as after a kill before its first save was complete.
    end, losses = tiny.checksums(run, 34), tiny.losses(run)
    shutil.rmtree(run / 'checkpoints')
    (run / 'checkpoints').mkdir()
    (run / 'run.json').write_text(json.dumps(info | {'saved_step': None}))
    capsys.readouterr()
    assert cli.main(['train', '--run_dir', str(run)]) == 0
    assert f'resumed from step 30 of {reference_run[0]}' in capsys.readouterr().out
    assert (tiny.checksums(run, 34), tiny.losses(run)) == (end, losses)


def test_a_branch_without_a_complete_first_save_starts_again(reference_run, tmp_path, monkeypatch, capsys):
    """run.json of a branch must not claim a checkpoint before there is one."""
    from lm.runs.branch import Branch

    monkeypatch.setattr(Branch, 'copy_metrics', lambda self: 1 / 0)
    assert branch(reference_run, tmp_path / 'run') == 1
    assert json.loads((tmp_path / 'run' / 'run.json').read_text())['saved_step'] is None
    capsys.readouterr()


@pytest.mark.parametrize(
    ('changes', 'code', 'message'),
    [
        ({'step': 20}, 2, '--step 20: it has checkpoints of 30, 40; choose one of these'),
        ({'model__d_model': 64}, 44, 'of this run float32'),
        ({'train__context_length': 16}, 44, 'train.context_length was 32, now 16'),
        ({'train__steps': 30}, 2, '--step 30: train.steps = 30 leaves nothing to train'),
    ],
)
def test_impossible_branches_are_refused(reference_run, tmp_path, capsys, changes, code, message):
    assert branch(reference_run, tmp_path / 'run', **changes) == code
    error = capsys.readouterr().err.splitlines()[-1]
    assert message in error
    assert error.startswith('lm train: error: ')
    assert not (tmp_path / 'run').exists()


def test_another_tokenizer_is_refused(reference_run, other_tokens, tmp_path, capsys):
    assert branch(reference_run, tmp_path / 'run', data__path=str(other_tokens)) == 44
    assert 'tokenizer is ' in capsys.readouterr().err
    assert not (tmp_path / 'run').exists()


def test_a_directory_that_has_begun_is_refused(reference_run, tmp_path, capsys):
    assert branch(reference_run, reference_run[0]) == 2
    assert 'is the run itself' in capsys.readouterr().err
    shutil.copytree(reference_run[0], tmp_path / 'run')
    held = (tmp_path / 'run' / 'run.json').read_bytes()
    assert branch(reference_run, tmp_path / 'run') == 44
    assert 'holds a run that has begun, not a branch; name a new --run_dir' in capsys.readouterr().err
    assert (tmp_path / 'run' / 'run.json').read_bytes() == held


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        (['--step', '30'], '--step 30: give both --branch_from and --step'),
        (['--branch_from', 'BASE'], 'reference0/run: give both --branch_from and --step'),
        (['--branch_from', 'BASE', '--step', '30', '--rewind_to', '30'], '--branch_from and --rewind_to'),
        (['--branch_from', '/no/such/run', '--step', '30'], 'holds no config.gin'),
    ],
)
def test_flags_that_contradict_each_other_are_refused(reference_run, tiny_flags, tmp_path, capsys, flags, message):
    flags = [str(reference_run[0]) if word == 'BASE' else word for word in flags]
    assert cli.main(['train', '--run_dir', str(tmp_path / 'run'), *tiny_flags, *flags]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == '', 'work was done before'
    assert not (tmp_path / 'run').exists()


def test_python_calls_cannot_rewind_a_branch_either(reference_run, tmp_path):
    run = lm.load(str(reference_run[0]))
    with pytest.raises(lm.errors.ConfigError, match='--branch_from and --rewind_to: give one of them'):
        lm.train(run.experiment, str(tmp_path / 'run'), rewind_to=30, branch_from=str(reference_run[0]), step=30)
    assert not (tmp_path / 'run').exists()
