"""`lm train` refuses errors before its first step; everything that plans a run refuses them in the same words."""

import shutil
import subprocess
import sys

import pytest
import tiny

from lm import cli
from lm.experiment import load
from lm.plan import validate

WRONG = {
    'warm-up': ({'train.steps': 4, 'optimizer.warmup_steps': 10}, 2, 'optimizer.warmup_steps = 10'),
    'vocabulary': ({'model.vocab_size': 100}, 44, 'set model.vocab_size = 400'),
    'split': ({'data.train_split': 'nowhere'}, 2, "split 'nowhere'"),
    'evaluation split': ({'data.eval_split': 'nowhere'}, 2, "split 'nowhere'"),
    'evaluation context': ({'evaluate.context_length': 2**20}, 2, 'evaluate.context_length = 1048576'),
    'stride': ({'evaluate.window': 'sliding:33'}, 2, 'the stride must be at most the context'),
    'ranges': ({'train.skip_batches': [(5, 3)]}, 2, 'train.skip_batches'),
    'length': ({'train.context_length': 2**17, 'train.tokens_per_step': 2**20}, 2, 'train.context_length = 131072'),
    'mechanism': ({'model.attention': '@hybrid()', 'hybrid.parts': 3}, 2, 'hybrid.parts = 3'),
    'evaluation lengths': (
        {'data.path': '', 'data.task': '@state_tracking()', 'state_tracking.eval_lengths': '[32, 64]'}
        | {'model.learned_positions': 32},
        *(2, 'model.learned_positions = 32: fewer than the 64 tokens'),
    ),
    'lengths of a task': (
        {'data.path': '', 'data.task': '@state_tracking()', 'state_tracking.eval_lengths': '[32, 64]'}
        | {'evaluate.context_length': 128},
        *(2, 'evaluate.context_length = 128: @state_tracking() is scored at lengths of its own, 32, 64'),
    ),
    'evaluation of a task': (
        {'data.path': '', 'data.task': '@induction_heads()', 'evaluate.context_length': 1},
        *(2, 'evaluate.context_length = 1: @induction_heads() needs at least'),
    ),
    'task': ({'data.path': '', 'data.task': '@associative_recall()'}, 2, 'train.context_length = 4'),
}  # fmt: skip


@pytest.fixture
def plan(tokens, tmp_path):
    """Returns (flags of the tiny experiment with changes, flags of a sweep over two of its seeds)."""

    def make(changes: dict) -> tuple[list[str], list[str]]:
        flags = tiny.params(tiny.MODEL | {'data.path': str(tokens)} | changes)
        (tmp_path / 's.gin').write_text('train.seed = [0, 1]')
        return flags, ['sweep', '--run_dir', str(tmp_path / 'root'), '--sweep_file', str(tmp_path / 's.gin'), *flags]

    return make


@pytest.mark.parametrize('name', WRONG)
def test_errors_that_stop_training_stop_every_check_before(name, plan, tmp_path, capsys):
    changes, code, words = WRONG[name]
    if name == 'task':
        changes = changes | {'train.context_length': 4}
    flags, sweep = plan(changes)
    told = []
    for command in (
        ['train', '--run_dir', str(tmp_path / 'run'), *flags],
        ['check', *flags],
        [*sweep, '--dry_run'],
        sweep,
    ):
        assert cli.main(command) == code, command[0]
        told.append(capsys.readouterr().err.splitlines()[-1].partition(': error: ')[2])
    assert words in told[0]
    assert told[1] == told[0]
    assert told[2] == told[3] == f'{told[0]} (in the point seed-0)'
    assert not (tmp_path / 'run').exists()
    assert not (tmp_path / 'root').exists()


def test_a_store_without_its_tokenizer_is_refused_before_the_first_step(plan, tokens, tmp_path, capsys):
    """The first evaluation, a thousand steps later, needs the tokenizer."""
    store = tmp_path / 'store'
    shutil.copytree(tokens, store)
    (store / 'tokenizer.model').unlink()
    flags, sweep = plan({'data.path': str(store)})
    for command in (['train', '--run_dir', str(tmp_path / 'run'), *flags], ['check', *flags], sweep):
        assert cli.main(command) == 44, command[0]
        assert f'{store}: tokenizer.model is missing' in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / 'run').exists()


def test_the_run_that_training_starts_from_is_validated(plan, reference_run, tmp_path, capsys):
    start = {'train.init_from': str(reference_run[0])}
    flags, sweep = plan(start | {'model.head_dim': 8})
    assert cli.main(['check', *flags]) == 44
    assert ' there and ' in capsys.readouterr().err
    assert cli.main([*sweep, '--dry_run']) == 44
    flags, _ = plan(start | {'model.attention': '[@softmax(), @gated_linear()]', 'model.d_model': 64})
    assert cli.main(['check', *flags]) == 44
    assert 'embedding.embedding is ' in capsys.readouterr().err
    flags, sweep = plan(start)
    assert cli.main([*sweep, '--dry_run']) == 0
    assert 'not checked' not in capsys.readouterr().out


def test_absent_files_are_reported_and_stop_only_commands_that_would_train(plan, tmp_path, capsys):
    for changes, words in (
        ({'data.path': str(tmp_path / 'nowhere')}, 'no finished token store'),
        ({'train.init_from': str(tmp_path / 'nowhere')}, 'holds no checkpoint'),
    ):
        flags, sweep = plan(changes)
        assert cli.main(['check', *flags]) == 0
        assert f'not checked: {next(iter(changes))}' in capsys.readouterr().err
        assert cli.main([*sweep, '--dry_run']) == 0
        printed = capsys.readouterr().out
        assert printed.count('not checked') == 1
        assert words in printed
        assert cli.main(sweep) == 44
        assert words in capsys.readouterr().err
        assert not (tmp_path / 'root').exists()


def test_a_point_that_has_begun_needs_no_other_run(plan, tmp_path, capsys):
    """The point goes on from its own checkpoint, as `lm train` does; a point without a checkpoint is still refused."""
    _, sweep = plan({'train.init_from': str(tmp_path / 'gone')})
    for seed, missing in ((0, 1), (1, 0)):
        saved = tmp_path / 'root' / f'seed-{seed}' / 'checkpoints' / '10'
        saved.mkdir(parents=True)
        (saved / 'commit_success.txt').touch()
        assert cli.main([*sweep, '--dry_run']) == 0
        assert capsys.readouterr().out.count('not checked') == missing


def test_a_known_number_of_devices_is_checked(tokens):
    experiment = load((), tiny.params(tiny.MODEL | {'data.path': str(tokens)})[1::2])
    assert validate(experiment, devices=4) == []
    with pytest.raises(Exception, match='3 devices cannot share'):
        validate(experiment, devices=3)


def test_the_sweep_leaves_the_devices_to_its_points(tmp_path):
    """The test uses its own process: reading the directories of the points must not start JAX's back ends."""
    program = (
        'from jax._src import xla_bridge\nfrom lm.sweep.sweep import Sweep\nfrom lm.sweep.points import make_points\n'
        f'Sweep({str(tmp_path)!r}, make_points((), [{str(tmp_path / "s.gin")!r}])).check()\n'
        'assert not xla_bridge.backends_are_initialized()\n'
    )
    (tmp_path / 's.gin').write_text('train.seed = [0, 1]')
    done = subprocess.run([sys.executable, '-c', program], env=tiny.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
