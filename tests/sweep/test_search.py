"""`lm sweep --search`: the same trials whatever dies, pruned runs, and several machines on one search."""

import dataclasses
import itertools
import json
import math
import pathlib
import re
import subprocess
import sys
import types

import fake_trainer
import pytest
import shipped
import tiny

from lm.cli import main
from lm.errors import ConfigError, MismatchError
from lm.runs import sweep_file
from lm.runs.config_diff import parse_bindings
from lm.sweep import runner as runner_module
from lm.sweep.options import SearchOptions
from lm.sweep.points import make_points
from lm.sweep.search import run as run_module
from lm.sweep.search.distributions import Choice, Numbers
from lm.sweep.search.search import Search
from lm.sweep.search.space import make_space
from lm.sweep.search.study import Study, TrialResult
from lm.sweep.status import read_status
from lm.sweep.sweep import Sweep

SPACE = """\
optimizer.peak_learning_rate = log_uniform(1e-5, 1e-1)  # the best is 1e-3
model.n_layers = integers(1, 4)
train.steps = 810
train.eval_every = 30
"""


class Killed(BaseException):
    """The process of the search is gone: it ends nothing, and writes nothing."""


@pytest.fixture
def search(tmp_path, monkeypatch):
    """Runs a search whose trainings are stand-ins; returns the exit code."""
    (tmp_path / 'space.gin').write_text(SPACE)
    notes = tmp_path / 'notes'
    notes.mkdir()
    program = tmp_path / 'python'
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -S {fake_trainer.__file__} "$@"\n')
    program.chmod(0o755)
    monkeypatch.chdir(tiny.ROOT)
    monkeypatch.setenv('FAKE_TRAINER', str(notes))
    monkeypatch.setattr(runner_module, 'sys', types.SimpleNamespace(executable=str(program), stdout=sys.stdout))
    monkeypatch.setattr(runner_module, 'POLL_SECONDS', 0.01)
    monkeypatch.setattr(run_module, 'LOOK_SECONDS', 0.0)
    monkeypatch.setattr(run_module, 'validate_point', lambda *_: [])

    def call(root, *flags):
        files = ['--gin_file', 'configs/experiments/quickstart.gin', '--sweep_file', str(tmp_path / 'space.gin')]
        return main(['sweep', '--search', '--run_dir', str(tmp_path / root), *files, *flags])

    return call


def read_trials(root):
    """Returns the drawn values of the trials, in their order."""
    found = []
    for path in sorted(root.glob('trial-*')):
        config = parse_bindings((path / 'config.gin').read_text())
        found.append((config['optimizer.peak_learning_rate'], config['model.n_layers']))
    return found


@pytest.mark.parametrize('flags', [(), ('--prune',), ('--prune', '--jobs', '3')], ids=['plain', 'prune', 'three'])
def test_a_search_of_24_trials_that_is_killed_ten_times_proposes_the_same(search, flags, tmp_path, monkeypatch):
    assert search('whole', '--trials', '24', *flags) == 0
    for name, code in (('trial-0003', 42), ('trial-0009', 42)):
        (tmp_path / 'notes' / f'{name}.{code}').touch()
    sleeps, limit, kills, started = itertools.count(), [1], 0, []
    sleep = runner_module.time.sleep

    class Recorded(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, 'Popen', Recorded)

    def sleep_or_die(seconds):
        if next(sleeps) == limit[0]:
            raise Killed
        sleep(0.01)

    clock = types.SimpleNamespace(**{**vars(runner_module.time), 'sleep': sleep_or_die})
    monkeypatch.setattr(runner_module, 'time', clock)
    while True:
        try:
            code = search('killed', '--trials', '24', *flags)
        except Killed:
            kills += 1
            for process in started:  # the system would end it
                process.wait()
            limit[0] = next(sleeps) + (1 if kills < 10 else 10**6)
            if kills == 5:
                (tmp_path / 'killed' / 'sweep.json').unlink()  # nothing but the run directories counts
        else:
            if code == 0:
                break
            assert code == 42  # a trial was preempted
    assert kills == 10
    whole, killed = (read_trials(tmp_path / root) for root in ('whole', 'killed'))
    assert len(whole) == 24
    assert killed == whole
    assert len(set(whole)) == 24
    rows = [sweep_file.read_rows(tmp_path / root) for root in ('whole', 'killed')]
    ended = [{row['point']: row['status'] for row in found} for found in rows]
    # A trial may reach its end before the runner looks, and is then done rather than pruned. The study is the same.
    assert {status for found in ended for status in found.values()} <= {'done', 'pruned'}
    facts = [sweep_file.read_search(tmp_path / root) for root in ('whole', 'killed')]
    assert facts[0] == facts[1]
    assert facts[0]['importance']['optimizer.peak_learning_rate'] > 0.5


def test_a_pruned_run_has_its_own_status_and_can_continue(search, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv('FAKE_SECONDS', '0.02')
    assert search('root', '--trials', '8', '--prune') == 0
    printed = capsys.readouterr().out
    root = tmp_path / 'root'
    pruned = [row for row in sweep_file.read_rows(root) if row['status'] == 'pruned']
    assert pruned
    name = pruned[0]['point']
    step = int(re.search(rf'{name}: pruned at step (\d+)', printed)[1])
    found = {row['point']: row for row in read_status(root)}[name]
    assert (found['status'], found['error']) == ('pruned', f'pruned at step {step}')
    assert step <= pruned[0]['step'] < 810, 'it was told to stop'
    best = re.search(r'the best is (\S+), loss ([\d.]+)', printed)
    losses = {row['point']: row['loss'] for row in sweep_file.read_rows(root) if row['status'] == 'done'}
    assert best[1] == min(losses, key=losses.get)
    # It goes on where it stopped, as any run.
    config = root / 'points' / f'{name}.gin'
    assert fake_trainer.main(['--run_dir', str(root / name), '--gin_file', str(config)]) == 0
    trials = read_trials(root)
    assert search('root', '--trials', '9', '--prune') == 0
    assert {row['point']: row['status'] for row in sweep_file.read_rows(root)}[name] == 'done'
    assert read_trials(root)[:8] == trials
    assert len(read_trials(root)) == 9


def test_two_machines_work_on_one_search(search, tmp_path, monkeypatch):
    assert search('alone', '--trials', '6', '--jobs', '2') == 0
    (tmp_path / 'notes' / 'log').unlink()
    monkeypatch.setenv('FAKE_SECONDS', '0.03')
    machine = (
        'import sys, types; from lm.cli import main; from lm.sweep import runner; from lm.sweep.search import run; '
        'runner.sys = types.SimpleNamespace(executable=sys.argv.pop(1), stdout=sys.stdout); '
        'run.validate_point = lambda *_: []; run.LOOK_SECONDS = 0.1; sys.exit(main(sys.argv[1:]))'
    )
    command = [sys.executable, '-c', machine, str(tmp_path / 'python'), 'sweep', '--search', '--trials', '6']
    command += ['--parallel', '2', '--run_dir', str(tmp_path / 'both')]
    command += ['--gin_file', 'configs/experiments/quickstart.gin', '--sweep_file', str(tmp_path / 'space.gin')]
    machines = [subprocess.Popen(command) for _ in range(2)]
    assert [machine.wait(timeout=120) for machine in machines] == [0, 0]
    assert read_trials(tmp_path / 'both') == read_trials(tmp_path / 'alone')
    trained = (tmp_path / 'notes' / 'log').read_text().split()
    assert sorted(trained) == [f'trial-{i:04}' for i in range(6)], 'a trial was trained twice'


def test_failures_are_the_worst_losses_and_stay(search, tmp_path, capsys):
    for name, code in (('trial-0001', 43), ('trial-0002', 1)):
        (tmp_path / 'notes' / f'{name}.{code}').touch()
    assert search('root', '--trials', '4') == 0
    assert '1 diverged (43), 2 done, 1 failed (1)' in capsys.readouterr().out
    trials = read_trials(tmp_path / 'root')
    assert search('root', '--trials', '4', '--retry_failed') == 0
    assert '4 done' in capsys.readouterr().out
    assert read_trials(tmp_path / 'root') == trials


def test_a_search_that_differs_is_refused(search, tmp_path, capsys):
    assert search('root', '--trials', '2') == 0
    for flags, message in (
        (('--seed', '1'), 'holds a search with seed = 0, not 1'),
        (('--prune',), 'prune = false, not true'),
        (('--gin_param', 'train.eval_every = None', '--prune'), '--prune: needs evaluations'),
        (('--gin_param', 'model.n_layers = 1'), 'the search draws it (integers(1, 4))'),
        (('--index', '0'), '--search and --index'),
        (('--trials', '0'), '--trials: 0: must be at least 1'),
        (('--jobs', '2', '--parallel', '1'), '--parallel 1: must be at least 2'),
    ):
        capsys.readouterr()
        assert search('root', *flags) == 2
        assert message in capsys.readouterr().err
    assert main(['sweep', '--run_dir', 'x', '--trials', '2']) == 2
    assert 'give --search as well' in capsys.readouterr().err


def refuse_deep_models(sweep, point, devices, cache):
    if point.experiment.model.n_layers > 2:
        raise ConfigError(f'model.n_layers = {point.experiment.model.n_layers}: too deep (in the point {point.name})')
    return []


def test_a_search_goes_on_after_a_refused_trial(search, tmp_path, monkeypatch, capsys):
    """It also goes on in a later call, and with --retry_failed, where the trial is refused once more.

    What is drawn while trials run is checked by the training itself, which has a stand-in here.
    """
    monkeypatch.setattr(run_module, 'validate_point', refuse_deep_models)
    root = tmp_path / 'root'
    for flags in (('4',), ('9',), ('10', '--retry_failed')):
        assert search('root', '--trials', *flags) == 0
        rows = sweep_file.read_rows(root)
        assert len(rows) == int(flags[0])
        refused = {row['point'] for row in rows if (row['status'], row['exit_code']) == ('failed', 2)}
        assert {row['point'] for row in rows if row['status'] == 'done'} == {row['point'] for row in rows} - refused
        assert refused
        assert all(int(row['settings']['model.n_layers']) > 2 for row in rows if row['point'] in refused)
    assert not any((root / name).exists() for name in refused)
    capsys.readouterr()
    assert search('other', '--trials', '30', '--dry_run') == 0
    assert re.search(r'trial-\d+  \[refused\].*\n', capsys.readouterr().out)
    assert not (tmp_path / 'other').exists()


def test_a_search_whose_trials_are_all_refused_ends_with_the_error_of_the_first(search, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_module, 'validate_point', lambda *_: refuse_deep_models(*_) or 1 / 0)
    monkeypatch.setattr(run_module, 'MOST_REFUSED', 2)
    (tmp_path / 'space.gin').write_text(SPACE.replace('integers(1, 4)', 'integers(3, 4)'))
    assert search('root', '--trials', '40') == 2
    assert 'too deep (in the point trial-0000)' in capsys.readouterr().err
    assert not (tmp_path / 'root').exists()


def test_drawn_values_that_make_no_configuration_are_a_refused_trial(search, tmp_path, capsys):
    (tmp_path / 'space.gin').write_text(
        SPACE + 'train.tokens_per_step = choice(4096, 4224)\ntrain.context_length = choice(128, 256)\n'
    )
    assert search('root', '--seed', '3', '--trials', '12') == 0
    rows = sweep_file.read_rows(tmp_path / 'root')
    refused = [row for row in rows if row['status'] != 'done']
    assert {(row['exit_code'], row['settings']['train.tokens_per_step']) for row in refused} == {(2, '4224')}
    assert all('must be a multiple of train.context_length = 256' in row['error'] for row in refused)
    # They have no file: it would have other values, and would be trained under their names.
    root, names = tmp_path / 'root', {row['point'] for row in refused}
    assert {path.stem for path in (root / 'points').glob('*.gin')} == {row['point'] for row in rows} - names
    for row in rows:
        if row['point'] not in names:
            text = (root / 'points' / f'{row["point"]}.gin').read_text()
            assert f'train.tokens_per_step = {row["settings"]["train.tokens_per_step"]}\n' in text
    before = (root / 'sweep.json').read_text()
    number = str(refused[0]['index'])
    for flags in (['--index', number], ['--index', refused[0]['point']]):
        assert main(['sweep', '--run_dir', str(root), *flags]) == 2
        assert f'point {refused[0]["point"]}: train.tokens_per_step = 4224' in capsys.readouterr().err
    assert (root / 'sweep.json').read_text() == before
    assert not (root / refused[0]['point']).exists()
    # An earlier version left such files.
    left = root / 'points' / f'{refused[0]["point"]}.gin'
    left.write_text('train.steps = 7\n')
    assert search('root', '--seed', '3', '--trials', '13') == 0
    assert not left.exists()
    assert [row for row in sweep_file.read_rows(root) if row['point'] in names] == refused


def test_a_dry_run_draws_what_it_can(search, capsys):
    assert search('root', '--trials', '9', '--dry_run', '--parallel', '2') == 0
    printed = capsys.readouterr().out
    assert printed.startswith('9 trials in ')
    assert re.findall(r'^(trial-\d+)  \[waiting\]  optimizer.peak_learning_rate = ', printed, re.M) == [
        'trial-0000', 'trial-0001'
    ]  # fmt: skip


@pytest.fixture
def write(tmp_path):
    def make(text):
        path = tmp_path / 'space.gin'
        path.write_text(text)
        return make_space(['configs/experiments/quickstart.gin'], [str(path)])

    return make


def test_values_can_be_read_back_from_a_run(write):
    space = write(
        'optimizer.peak_learning_rate = log_uniform(1e-4, 1e-2)\n'
        'model.attention = choice(@softmax(), @polysketch(), [@softmax(), @polysketch()])\n'
        'polysketch.sketch_size = choice(8, 16)\nmodel.n_layers = integers(2, 8, 2)\n'
        'optimizer.weight_decay = uniform(0, 0.2)\n'
    )
    assert space.distributions['model.n_layers'] == Numbers(2, 8, int, 2)
    assert isinstance(space.distributions['model.attention'], Choice)
    drawn = {'optimizer.peak_learning_rate': 0.00123456789, 'model.n_layers': 6, 'polysketch.sketch_size': '16'}
    drawn |= {'optimizer.weight_decay': 0.125}
    for attention in space.distributions['model.attention'].names:
        values = drawn | {'model.attention': attention}
        point = space.make_point(7, values)
        if attention == '@softmax()':
            del values['polysketch.sketch_size']
        assert point.name == 'trial-0007'
        assert point.settings.keys() == values.keys()
        assert space.read_values(parse_bindings(point.config), 'x') == values
    with pytest.raises(MismatchError, match=r'trial-0007: its model.n_layers = 3 is not in integers'):
        write('model.n_layers = integers(4, 8)').read_values({'model.n_layers': '3'}, 'trial-0007')


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('model.n_layers = [1, 2]', 'a list makes a grid'),
        ('model.n_layers = 2', 'nothing to search'),
        ('model.n_layers = integers(4, 2)', 'give the lower limit and a higher one'),
        ('model.n_layers = integers(1.5, 2)', 'whole numbers'),
        ('train.seed = choice(1, 1)', 'two different values'),
        ('optimizer.peak_learning_rate = log_uniform(0, 1)', 'above 0'),
        ("optimizer.peak_learning_rate = uniform('a', 1)", 'must be numbers'),
        ('WIDTH = choice(1, 2)', 'no macros'),
        ('train.steps = choice(1 + 1, 3)', r'space.gin:1: train.steps = choice\(1 \+ 1, 3\): cannot be read'),
        ('zip/train.steps = [1, 2]', 'zip/ is an axis of a grid'),
        ('variant/a/train.steps = 2', 'variant/ is an axis of a grid'),
        (
            'model.attention = choice(@near/softmax(), @far/softmax())\n'
            'near/softmax.window = 8\nfar/softmax.window = 9',
            'config.gin writes two of these values',
        ),
        ('polysketch.sketch_size = choice(8, 16)', 'polysketch'),
    ],
)
def test_mistakes_in_a_space(write, text, message):
    with pytest.raises(ConfigError, match=message):
        write(text)


@pytest.mark.parametrize('end', ['\n', '\r\n'], ids=['unix', 'windows'])
def test_comments_and_line_ends_do_not_matter(write, end):
    space = write(
        f'optimizer.peak_learning_rate = log_uniform(1e-4, 1e-2)  # around (1e-3){end}'
        f"data.eval_split = choice('a#(b)', 'c')  # a split{end}train.steps = 7  # (fixed){end}"
    )
    assert space.distributions['optimizer.peak_learning_rate'] == Numbers(1e-4, 1e-2, log=True)
    assert space.distributions['data.eval_split'] == Choice(('a#(b)', 'c'), written=("'a#(b)'", "'c'"))


def test_a_value_that_config_gin_leaves_out_is_read_back(write):
    space = write('model.latent_rank = choice(16, None)\nsoftmax.qk_norm = choice(True, False)\n')
    for drawn in space.distributions['model.latent_rank'].names:
        values = {'model.latent_rank': drawn, 'softmax.qk_norm': 'True'}
        assert space.read_values(parse_bindings(space.make_point(0, values).config), 'x') == values


@pytest.mark.parametrize('path', shipped.SEARCHES, ids=lambda path: path.stem)
def test_the_spaces_of_the_project(path, monkeypatch):
    monkeypatch.chdir(tiny.ROOT)
    assert len(make_space(['configs/experiments/quickstart.gin'], [str(path)]).distributions) > 2


def test_a_grid_says_what_a_distribution_is_for(tmp_path):
    path = tmp_path / 'space.gin'
    path.write_text('train.seed = [0, 1]\noptimizer.peak_learning_rate = log_uniform(1e-4, 1e-2)\n')
    with pytest.raises(ConfigError, match=r'space.gin:2.*is a distribution, which lm sweep --search draws from'):
        make_points([], [str(path)])


def test_a_grid_is_no_search(tmp_path, write):
    sweep_file.write_rows(tmp_path / 'root', [])
    with pytest.raises(ConfigError, match='holds a grid'):
        Search(tmp_path / 'root', write('model.n_layers = integers(1, 2)'), SearchOptions())


def test_a_grid_does_not_replace_the_table_of_a_search(tmp_path):
    point = {'point': 'trial-0000', 'status': 'done', 'step': 1, 'steps': 1}
    sweep_file.write_rows(tmp_path, [point], {'search': {'sampler': 'tpe'}})
    (trial,) = make_points([], [write_grid(tmp_path, 'train.seed = [0]')])
    with pytest.raises(ConfigError, match=r'holds a search, whose table seed-0 would replace'):
        Sweep(tmp_path, [trial]).check()
    Sweep(tmp_path, [dataclasses.replace(trial, name='trial-0000')]).check()


def write_grid(folder: pathlib.Path, text: str) -> str:
    (folder / 'grid.gin').write_text(text)
    return str(folder / 'grid.gin')


def test_the_sampler_learns():
    """After 20 trials TPE draws nearer to the best value than random draws do."""
    space = {'x': Numbers(0.0, 1.0)}

    def search(sampler):
        results: list[TrialResult] = []
        study = Study(space, SearchOptions(sampler, 40), lambda n: results[n] if n < len(results) else None, 10, 1)
        for number in range(40):
            x = study.draw(number)['x']
            results.append(TrialResult({'x': x}, [(10, (x - 0.3) ** 2)], True))
        return [abs(result.values['x'] - 0.3) for result in results[20:]]

    assert sum(search('tpe')) < 0.5 * sum(search('random'))
    assert all(map(math.isfinite, search('tpe')))


def test_a_trial_that_is_trained_by_itself_stays_a_part_of_the_search(search, tmp_path, monkeypatch):
    assert search('root', '--trials', '3') == 0
    facts = sweep_file.read_search(tmp_path / 'root')
    (tmp_path / 'root' / 'trial-0001' / 'checkpoints' / '810' / 'commit_success.txt').unlink()
    trained = []
    monkeypatch.setattr('lm.sweep.run.train_in_job', lambda experiment, path, job: trained.append(path))
    assert main(['sweep', '--run_dir', str(tmp_path / 'root'), '--index', '1']) == 0
    assert trained == [str(tmp_path / 'root' / 'trial-0001')]
    assert sweep_file.read_search(tmp_path / 'root') == facts
    assert search('root', '--trials', '3') == 0


def test_optuna_is_named_where_it_is_missing(monkeypatch, capsys):
    monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
    assert main(['sweep', '--run_dir', 'x', '--sweep_file', 'y.gin', '--search']) == 2
    assert "--search: needs optuna; pip install -e '.[search]'" in capsys.readouterr().err


def test_the_table_of_a_search_tells_how_it_was_drawn(search, tmp_path):
    assert search('root', '--trials', '2', '--seed', '3') == 0
    table = json.loads((tmp_path / 'root' / 'sweep.json').read_text())
    assert table['search'] == {
        **{'sampler': 'tpe', 'seed': 3, 'trials': 2, 'parallel': 1, 'prune': False, 'importance': {}},
        'space': {'optimizer.peak_learning_rate': 'log_uniform(1e-5, 1e-1)', 'model.n_layers': 'integers(1, 4)'},
    }
