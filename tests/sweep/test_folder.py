"""The folder of a sweep: it knows the state of each point, and its measurements."""

import errno
import json
import types

import made_up_runs
import pytest

from lm.attention.softmax import Softmax
from lm.errors import ConfigError, LmError, MismatchError, Preempted
from lm.pod.job import JobAddress
from lm.runs.run_dir import RunDir
from lm.sweep.run import run_point
from lm.sweep.sweep import Sweep


@pytest.fixture
def sweep(tmp_path) -> Sweep:
    """Makes points a (done), b (without its last checkpoint), c (without files) and d (failed before it began)."""
    for name in 'ab':
        made_up_runs.write_run(tmp_path / name, Softmax(), steps=100, data='x')
    (tmp_path / 'b' / 'checkpoints' / '100' / 'commit_success.txt').unlink()
    train = types.SimpleNamespace(steps=100)
    points = [
        types.SimpleNamespace(
            index=i,
            name=name,
            settings={'train.seed': str(i)},
            experiment=types.SimpleNamespace(train=train),
            fault=None,
            config=RunDir(tmp_path / 'a').config.read_text() if name in 'ab' else f'# {name}\n',
        )
        for i, name in enumerate('abcd')
    ]
    sweep = Sweep(tmp_path, points)
    sweep.notes.mkdir()
    sweep.record_failure(points[3], 43, 'it diverged')
    return sweep


def test_the_row_of_each_point(sweep, tmp_path):
    a, b, c, d = sweep.write_results()
    assert [row['status'] for row in (a, b, c, d)] == ['done', 'interrupted', 'waiting', 'failed']
    assert [row['index'] for row in (a, b, c, d)] == [0, 1, 2, 3]
    assert (a['point'], a['settings'], a['run_dir']) == ('a', {'train.seed': '0'}, str(tmp_path / 'a'))
    evaluation = json.loads((tmp_path / 'a' / 'metrics.jsonl').read_text().splitlines()[-1])
    for name in ('loss', 'perplexity', 'word_perplexity', 'bits_per_byte', 'split'):
        assert a[name] == b[name] == evaluation[name]
        assert c[name] is d[name] is None
    assert (a['step'], a['steps'], a['accuracy']) == (100, 100, None)
    assert (c['step'], c['steps'], c['tokens_per_second']) == (0, 100, None)
    assert a['tokens_per_second'] > 1e6
    assert [(row['exit_code'], row['error']) for row in (a, b, c, d)] == [
        *((0, None), (None, None), (None, None), (43, 'it diverged'))
    ]
    assert set(a) == set(c)
    assert json.loads((tmp_path / 'sweep.json').read_text())['points'] == [a, b, c, d]
    assert [sweep.is_finished(point) for point in sweep.points] == [True, False, False, False]


def test_a_point_that_diverged_in_its_last_steps_has_failed(sweep):
    a = sweep.points[0]
    sweep.record_failure(a, 43, 'it diverged')
    row = sweep.result(a)
    assert (row['status'], row['exit_code'], row['step']) == ('failed', 43, 100)
    assert not sweep.is_finished(a)
    sweep.prepare(a)
    assert sweep.is_finished(a)


def test_a_failure_counts_until_the_point_is_done_or_starts_again(sweep):
    a, b, _, d = sweep.points
    for point in (a, b):
        sweep.record_failure(point, 1, 'no memory')
    assert [sweep.result(point)['status'] for point in (a, b)] == ['done', 'failed']
    assert (sweep.result(a)['exit_code'], sweep.result(a)['error']) == (0, None)
    assert (sweep.result(b)['exit_code'], sweep.result(b)['step']) == (1, 100)
    for point in (b, d):
        path = sweep.prepare(point)
        assert path == str(sweep.notes / f'{point.name}.gin')
        assert (sweep.notes / f'{point.name}.gin').read_text() == point.config
    assert [sweep.result(point)['status'] for point in (b, d)] == ['interrupted', 'waiting']
    assert sweep.prepare(d)  # although there is no failure to forget


def test_a_point_that_ends_while_another_process_reads_is_in_the_table(sweep, tmp_path, monkeypatch):
    commit, other = tmp_path / 'b' / 'checkpoints' / '100' / 'commit_success.txt', Sweep(tmp_path, sweep.points)
    read = Sweep.result

    def result(self, point):
        row = read(self, point)
        if self is sweep and point.name == 'd' and not commit.exists():  # this one has read everything
            commit.write_text('')
            other.write_results()
        return row

    monkeypatch.setattr(Sweep, 'result', result)
    assert [row['status'] for row in sweep.write_results()] == ['done', 'done', 'waiting', 'failed']
    assert json.loads((tmp_path / 'sweep.json').read_text())['points'][1]['status'] == 'done'


def test_a_point_whose_steps_grew_is_not_finished(sweep):
    """`lm train` continues such a run; the configuration in its folder still has the old number of steps."""
    point = sweep.points[0]
    point.experiment.train.steps = 200
    assert not sweep.is_finished(point)
    row = sweep.result(point)
    assert (row['status'], row['step'], row['steps']) == ('interrupted', 100, 200)


def test_prepare_makes_the_folder(tmp_path):
    point = types.SimpleNamespace(name='p', config='# p\n', fault=None)
    assert Sweep(tmp_path / 'new' / 'root', [point]).prepare(point) == str(tmp_path / 'new/root/points/p.gin')


def test_a_full_disk_does_not_change_how_points_end(sweep, monkeypatch, caplog):
    _, _, c, d = sweep.points

    def full(path, *_):
        raise OSError(errno.ENOSPC, 'No space left on device')

    for module in ('lm.sweep.sweep', 'lm.runs.sweep_file'):
        monkeypatch.setattr(f'{module}.write_atomically', full)
    assert [row['status'] for row in sweep.write_results()] == ['done', 'interrupted', 'waiting', 'failed']
    sweep.record_failure(c, 43, 'it diverged')
    assert [r.message.partition(' could')[0] for r in caplog.records] == [
        *(str(sweep.root / 'sweep.json'), str(sweep.notes / 'c.json'))
    ]
    with pytest.raises(LmError, match=r'd.gin cannot be written .No space left on device.; make room'):
        sweep.prepare(d)
    assert sweep.result(d)['exit_code'] == 43

    # The end of a point in this process; its caller depends on it.
    def stopped(*_, **__):
        raise Preempted('stopped at step 3')

    monkeypatch.setattr(Sweep, 'prepare', lambda *_: '')
    monkeypatch.setattr('lm.sweep.run.train_in_job', stopped)
    with pytest.raises(Preempted):
        run_point(sweep, 2, JobAddress())


def test_a_directory_of_another_configuration_is_refused(sweep):
    sweep.points[:] = sweep.points[:1]
    sweep.check()
    sweep.points[0].config = sweep.points[0].config.replace('train.steps = 100', 'train.steps = 99')
    with pytest.raises(MismatchError, match=r'train\.steps was 100, now 99'):
        sweep.check()


def test_a_run_is_not_a_folder_of_a_sweep_nor_the_reverse(sweep, tmp_path):
    sweep.write_results()
    with pytest.raises(ConfigError, match='holds a sweep, which needs a folder of its own; name another folder'):
        RunDir(tmp_path).check_unchanged(sweep.points[0].config)
    with pytest.raises(ConfigError, match=r'a: is a run, which would hide the points; name another folder'):
        Sweep(tmp_path / 'a', []).check()


def test_neither_a_run_nor_a_sweep_lies_in_a_token_store(sweep, tmp_path):
    folder = tmp_path / 'store'
    folder.mkdir()
    (folder / 'dataset.json').write_text('{}')
    for check in (lambda: RunDir(folder).check_unchanged(sweep.points[0].config), Sweep(folder, []).check):
        with pytest.raises(ConfigError, match=r'store: holds a token store, which needs a folder of its own'):
            check()


def test_the_folder_of_a_sweep_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('HOME', str(tmp_path / 'home'))
    for given, root in (('x', tmp_path / 'x'), ('~/x', tmp_path / 'home' / 'x')):
        sweep = Sweep(given, [])
        assert (str(sweep.root), str(sweep.notes), sweep.is_local) == (str(root), str(root / 'points'), True)
    remote = Sweep('gs://bucket/x', [])
    assert (str(remote.root), remote.is_local) == ('gs://bucket/x', False)
