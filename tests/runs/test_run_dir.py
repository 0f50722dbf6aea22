"""The run directory: written atomically, resumed only by the same configuration, each step logged once."""

import json
import math
import subprocess
import sys
import types

import numpy as np
import pytest

from lm.errors import ConfigError, MismatchError
from lm.runs import metrics_file
from lm.runs.run_dir import RunDir, check_name, check_path, config_differences, git_commit

OLD = """# A complete configuration

# model
model.depth = 12
model.attention = [@a/polynomial(),
    @softmax()]

# a/polynomial
a/polynomial.degree = 4
checkpoint.keep_last = 2
train.log_every = 10
train.name = 'x = y'
"""


def lines(run: RunDir) -> list[dict]:
    return [json.loads(line) for line in (run.path / 'metrics.jsonl').read_text().splitlines()]


def record(step: int, kind: str = 'train', **more) -> dict:
    return {'kind': kind, 'step': step, 'loss': step / 2, **more}


def test_differences_of_configurations():
    assert config_differences(OLD, OLD) == []
    new = (
        OLD.replace('degree = 4', 'degree = 8').replace('softmax', 'taylor').replace('# model', '# MODEL') + 'b.c = 1\n'
    )
    assert config_differences(OLD, new) == [
        ('a/polynomial.degree', '4', '8'),
        ('model.attention', '[@a/polynomial(), @softmax()]', '[@a/polynomial(), @taylor()]'),
        ('b.c', None, '1'),
    ]


@pytest.mark.smoke
def test_create_and_resume(tmp_path):
    run = RunDir(tmp_path / 'runs' / 'first')
    assert not run.path.exists()
    assert not run.create_or_resume(OLD, {'parameters': 7, 'tokenizer': 'abc'})
    assert run.config.read_text() == OLD
    first = json.loads(run.info.read_text())
    assert {'lm', 'python', 'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy'} <= first['versions'].keys()
    assert first | {'parameters': 7, 'tokenizer': 'abc', 'device_count': 8, 'process_count': 1, 'resumed': []} == first

    new = OLD.replace('keep_last = 2', 'keep_last = 5').replace('log_every = 10', 'log_every = 1')
    assert run.create_or_resume(new, {'parameters': 7}, ['checkpoint.', 'train.log_every'])
    assert run.config.read_text() == new
    second = json.loads(run.info.read_text())
    assert second['started'] == first['started']
    assert len(second['resumed']) == 1
    assert sorted(p.name for p in run.path.iterdir()) == ['config.gin', 'run.json']


@pytest.mark.parametrize(
    ('before', 'after', 'message'),
    [
        ('degree = 4', 'degree = 8', r'a/polynomial\.degree was 4, now 8; give the old value, or a new --run_dir'),
        ('log_every = 10', 'log_every = 1', r'train\.log_every was 10, now 1'),
        ('depth = 12', 'depth = 13', r'model\.depth was 12, now 13'),
    ],
)
def test_another_configuration_is_refused(tmp_path, before, after, message):
    run = RunDir(tmp_path)
    run.create_or_resume(OLD, {})
    held = {path.name: path.read_bytes() for path in run.path.iterdir()}
    with pytest.raises(MismatchError, match=message):
        # neither of them allows what is changed: 'train.log' is no section
        run.create_or_resume(OLD.replace(before, after), {}, ['checkpoint.', 'train.log'])
    assert held == {path.name: path.read_bytes() for path in run.path.iterdir()}


def test_bindings_of_another_version_are_noted(tmp_path, caplog):
    run = RunDir(tmp_path)
    run.create_or_resume(OLD, {})
    run.create_or_resume(OLD + 'model.new = 1\n', {})
    assert 'model.new was absent, now 1' in caplog.text


def test_a_damaged_run_json_does_not_stop_a_run(tmp_path, caplog):
    run = RunDir(tmp_path)
    run.create_or_resume(OLD, {})
    run.info.write_text('{"started": ')
    assert run.create_or_resume(OLD, {})
    assert json.loads(run.info.read_text())['resumed'] == []
    assert 'run.json could not be read' in caplog.text


@pytest.mark.parametrize(
    'path', ['../x', 'a/../b', '/tmp/..', 'gs://bucket/../x', 'a\\..\\b', '', ' ', 'a\nb', 'x' * 300]
)
def test_hostile_paths_are_refused(path):
    with pytest.raises(ConfigError, match='--run_dir'):
        check_path(path)
    with pytest.raises(ConfigError):
        RunDir(path)


@pytest.mark.parametrize('name', ['', '..', '../x', '/etc/x', 'a b', 'a..b', '.hidden', '-flag', 'x' * 129, 'a\n', 'ü'])
def test_hostile_names_are_refused(name):
    with pytest.raises(ConfigError, match='run name'):
        check_name(name)


def test_good_names_and_paths():
    for name in ('a', 'run-1.2_x', 'x' * 128):
        assert check_name(name) == name
    for path in ('runs/a', '/tmp/a b', 'gs://bucket/run', './x', '...'):
        check_path(path)
    assert RunDir('runs/a').path.is_absolute()
    assert str(RunDir('gs://bucket/run').checkpoints) == 'gs://bucket/run/checkpoints'


def test_a_file_is_no_run_directory(tmp_path):
    (tmp_path / 'file').write_text('')
    with pytest.raises(ConfigError, match='is a file'):
        RunDir(tmp_path / 'file').create_or_resume(OLD, {})


def test_git_commit_of_this_checkout():
    commit = git_commit()
    assert commit is None or (len(commit.removesuffix('-dirty')) == 40 and int(commit.removesuffix('-dirty'), 16))


@pytest.mark.smoke
def test_metrics_after_a_restart_hold_each_step_once(tmp_path):
    run = RunDir(tmp_path)
    with run.metrics() as metrics:
        for step in range(1, 8):
            metrics.write(record(step))
            if step % 3 == 0:
                metrics.write(record(step, 'eval'))
    with open(run.path / 'metrics.jsonl', 'a') as file:
        file.write('{"kind": "train", "step": 8, "lo')
    with run.metrics(resume_at=3) as metrics:
        assert [(r['kind'], r['step']) for r in lines(run)] == [('train', 1), ('train', 2), ('train', 3), ('eval', 3)]
        assert metrics.has_evaluation(3)
        assert not metrics.has_evaluation(6)
        metrics.write(record(4))
        metrics.write(record(4, 'eval'))
        assert metrics.has_evaluation(4)
        assert len(lines(run)) == 6, 'a line must be on disk as soon as it is written'
    assert [p.name for p in run.path.iterdir()] == ['metrics.jsonl']


def test_a_line_that_lacks_only_its_end_is_cut_off(tmp_path):
    # else the next record would be appended to the same line
    (tmp_path / 'metrics.jsonl').write_text(json.dumps(record(1)) + '\n' + json.dumps(record(2)))
    with RunDir(tmp_path).metrics(resume_at=2) as metrics:
        metrics.write(record(3))
    assert [r['step'] for r in lines(RunDir(tmp_path))] == [1, 3]


def test_unreadable_lines_are_removed_and_named(tmp_path, caplog):
    (tmp_path / 'metrics.jsonl').write_text(json.dumps(record(1)) + '\n\x00\x00\n' + json.dumps(record(2)) + '\n')
    RunDir(tmp_path).metrics(resume_at=2).close()
    assert [r['step'] for r in lines(RunDir(tmp_path))] == [1, 2]
    assert 'line 2 is not a record' in caplog.text


def test_numbers_that_are_not_finite_are_valid_json(tmp_path):
    with RunDir(tmp_path).metrics() as metrics:
        metrics.write(
            record(1, loss_by_position=[{'loss': np.float32('inf')}], a=math.nan, b=-math.inf, c=None, d=True)
        )
        metrics.write(record(np.int64(2), loss=np.float64(0.1), x=np.arange(2)))
    first, second = lines(RunDir(tmp_path))
    assert (first['loss_by_position'], first['a'], first['b']) == ([{'loss': 'Infinity'}], 'NaN', '-Infinity')
    assert (first['c'], first['d']) == (None, True)
    assert (second['step'], second['loss'], second['x']) == (2, 0.1, [0, 1])


def test_object_stores_are_written_whole(tmp_path, monkeypatch):
    """The way of gs:// addresses, on a local file."""
    path = tmp_path / 'metrics.jsonl'
    path.write_text(json.dumps(record(1)) + '\n' + json.dumps(record(2)) + '\n')
    metrics = metrics_file.MetricsFile(path, resume_at=1)
    metrics._file.close()
    metrics._file, metrics._remote, metrics._lines = None, True, [json.dumps(record(1)) + '\n']
    metrics.write(record(2))
    assert len(path.read_text().splitlines()) == 1
    metrics.flush()
    assert len(path.read_text().splitlines()) == 2
    monkeypatch.setattr(metrics_file, 'REMOTE_SECONDS', 0.0)
    metrics.write(record(3))
    metrics.close()
    assert [json.loads(line)['step'] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_tensorboard_goes_through_clu(tmp_path, monkeypatch):
    written = []
    writer = types.SimpleNamespace(
        write_scalars=lambda step, scalars: written.append((step, scalars)), close=lambda: written.append('closed')
    )
    monkeypatch.setattr(metrics_file, '_summary_writer', lambda folder: writer)
    with RunDir(tmp_path).metrics(tensorboard=True) as metrics:
        metrics.write(record(4, mfu=None, bad=math.inf, split='validation', n=3))
    assert written == [(4, {'train/loss': 2.0, 'train/n': 3.0}), 'closed']


def test_without_the_packages_there_are_no_summaries(tmp_path):
    code = f"""
import sys
for name in ('tensorflow', 'clu', 'gin'):
    sys.modules[name] = None
from lm.runs.run_dir import RunDir
with RunDir({str(tmp_path)!r}).metrics(tensorboard=True) as metrics:
    metrics.write({{'kind': 'train', 'step': 1, 'loss': 1.0}})
"""
    subprocess.run([sys.executable, '-c', code], check=True, cwd=metrics_file.__file__.rsplit('/', 3)[0])
    assert not (tmp_path / 'tensorboard').exists()
    assert len(lines(RunDir(tmp_path))) == 1
