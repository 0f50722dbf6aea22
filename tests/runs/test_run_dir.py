"""The run directory is written atomically, resumes only with the same configuration, and logs each step once."""

import importlib.util
import json
import math
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
from unittest.mock import ANY

import numpy as np
import pytest

from lm.checkpoint.snapshot import COMMITTED, make_record
from lm.cli import main
from lm.config.configurable import Configurable, configurable, field
from lm.config.setting import write_binding
from lm.errors import ConfigError, LmError, MismatchError
from lm.experiment import Experiment, load_of_run
from lm.files import write_atomically
from lm.runs import info as run_info
from lm.runs import metrics_file
from lm.runs.config_diff import compare_texts
from lm.runs.info import git_commit, read_info
from lm.runs.paths import check_name, check_path, find_import
from lm.runs.records import read_jsonl
from lm.runs.run_dir import RunDir

ROOT = metrics_file.__file__.rsplit('/', 3)[0]

OLD = """# A complete configuration

# model
model.depth = 12
model.attention = [@a/polynomial(),
    @softmax()]

# a/polynomial
a/polynomial.degree = 4
checkpoint.keep_last = 2
train.log_every = 10
train.init_from = 'x = y'
"""


def lines(run: RunDir) -> list[dict]:
    return [json.loads(line) for line in (run.path / 'metrics.jsonl').read_text().splitlines()]


def record(step: int, kind: str = 'train', **more) -> dict:
    whole = {'loss': step / 2, 'grad_norm': 1.0, 'tokens': 64 * step, 'seconds': 0.5 * step}
    return {'kind': kind, 'step': step, **whole, **more}


def test_differences_of_configurations_are_found():
    assert compare_texts(OLD, OLD) == []
    new = (
        OLD.replace('degree = 4', 'degree = 8').replace('softmax', 'taylor').replace('# model', '# MODEL') + 'b.c = 1\n'
    )
    assert compare_texts(OLD, new) == [
        ('a/polynomial.degree', '4', '8'),
        ('model.attention', '[@a/polynomial(), @softmax()]', '[@a/polynomial(), @taylor()]'),
        ('b.c', None, '1'),
    ]


@pytest.mark.smoke
def test_a_directory_is_created_and_resumed(tmp_path):
    run = RunDir(tmp_path / 'runs' / 'first')
    assert not run.path.exists()
    assert not run.create_or_resume(OLD, {'parameters': 7, 'tokenizer': 'abc'})
    assert run.config.read_text() == OLD
    first = json.loads(run.info.read_text())
    (start,) = first['starts']
    assert {'lm', 'python', 'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy'} <= start['versions'].keys()
    assert start | {'device_count': 8, 'process_count': 1, 'first_step': 0, 'when': first['started']} == start
    assert first | {'parameters': 7, 'tokenizer': 'abc', 'saved_step': None, 'rewinds': []} == first

    new = OLD.replace('keep_last = 2', 'keep_last = 5').replace('log_every = 10', 'log_every = 1')
    assert run.create_or_resume(new, {'parameters': 7})
    assert run.config.read_text() == new
    second = json.loads(run.info.read_text())
    assert second['started'] == first['started']
    assert [set(start) for start in second['starts'][1:]] == [{'when', 'first_step'}], 'what is the same stands once'
    found = read_info(run.info)
    assert found['versions'] == start['versions']
    assert found | {'device_count': 8, 'resumed': [ANY], 'parameters': 7} == found
    assert sorted(p.name for p in run.path.iterdir()) == ['checkpoints', 'config.gin', 'run.json']


def test_another_version_of_jax_is_reported_and_recorded(tmp_path, monkeypatch, caplog):
    def versions(**installed):
        monkeypatch.setattr(
            run_info, 'describe_machine', lambda: {'versions': {'flax': '1', 'libtpu': None, **installed}}
        )

    run = RunDir(tmp_path)
    for installed in [{'jax': '0.10.2', 'jaxlib': '0.10.2'}] * 2:
        versions(**installed)
        run.create_or_resume(OLD, {})
    assert not caplog.records
    versions(jax='0.11.0', jaxlib='0.10.2', libtpu='0.0.51', flax='2')
    run.create_or_resume(OLD, {})
    [warning] = caplog.messages
    assert 'jax was 0.10.2, now 0.11.0; programs are compiled anew' in warning
    assert not {'\n', 'flax', 'libtpu', 'jaxlib'} & set(warning.replace(';', ' ').split())
    run.create_or_resume(OLD, {})
    assert len(caplog.messages) == 1, 'said once'
    starts = json.loads(run.info.read_text())['starts']
    assert [start.get('version_changes') for start in starts] == [None, None, {'jax': ['0.10.2', '0.11.0']}, None]
    assert 'version_changes' not in read_info(run.info), 'of that start, not of the newest'


@pytest.mark.parametrize(
    ('before', 'after', 'message'),
    [
        ('degree = 4', 'degree = 8', r'a/polynomial\.degree was 4, now 8; give the old value, or a new --run_dir'),
        ("init_from = 'x = y'", 'init_from = None', r"train\.init_from was 'x = y', now None"),
        ('depth = 12', 'depth = 13', r'model\.depth was 12, now 13'),
    ],
)
def test_another_configuration_is_refused(tmp_path, before, after, message):
    run = RunDir(tmp_path)
    run.create_or_resume(OLD, {})
    held = {path.name: path.read_bytes() for path in run.path.iterdir() if path.is_file()}
    with pytest.raises(MismatchError, match=message):
        run.create_or_resume(OLD.replace(before, after), {})
    assert held == {path.name: path.read_bytes() for path in run.path.iterdir() if path.is_file()}


def test_bindings_of_another_version_are_reported(tmp_path, caplog):
    run = RunDir(tmp_path)
    run.create_or_resume(OLD, {})
    run.create_or_resume(OLD + "model.new = 1\n\njsonl.path = 'there'\n", {})
    assert 'model.new was absent, now 1' in caplog.text
    assert 'jsonl' not in caplog.text, 'it may be anything'


class Tool(Configurable):
    """The base of the configurables below."""


@configurable('test_hammer')
class Hammer(Tool):
    mass: float = field(default=1.0, formerly='test_bench.mass')
    length: int = field(default=3, formerly='size', resume=True)


@configurable('test_saw')
class Saw(Tool):
    mass: float = field(default=2.0, formerly='test_bench.mass')


@configurable('test_bench')
class Bench(Configurable):
    tool: Tool = field(default=Hammer(), formerly='kind')
    spare: Tool = field(default=Saw())
    width: int = field(default=7)


def test_old_names_mean_the_fields_of_today():
    old = "test_bench.kind = 'test_hammer'\ntest_bench.mass = 4.0\ntest_hammer.size = 5\ntest_bench.spare = None\n"
    new = 'test_bench.tool = @test_hammer()\ntest_hammer.mass = 4.0\ntest_hammer.length = 5\n'
    new += 'test_bench.width = 7\ntest_bench.spare = None\n'
    assert compare_texts(old, new) == []
    assert compare_texts(old, new.replace('5', '6')) == [('test_hammer.length', '5', '6')]
    assert compare_texts(old, new.replace('4.0', '2.5')) == [('test_hammer.mass', '4.0', '2.5')]
    # A field that is younger than the run had its default.
    assert compare_texts(old, new.replace('7', '8')) == [('test_bench.width', '7', '8')]


def test_a_run_of_another_version_resumes(tmp_path, caplog):
    old = "test_bench.kind = 'test_hammer'\ntest_bench.mass = 4.0\ntest_hammer.size = 5\ntest_bench.spare = None\n"
    now = 'test_bench.tool = @test_hammer()\ntest_hammer.mass = 4.0\ntest_hammer.length = 6\ntest_bench.spare = None\n'
    (tmp_path / 'config.gin').write_text('# A complete configuration\n' + old)
    with pytest.raises(MismatchError, match=r'test_hammer\.mass was 4\.0, now 5\.0'):
        RunDir(tmp_path).create_or_resume(now.replace('4.0', '5.0'), {})
    assert RunDir(tmp_path).create_or_resume(now, {}), 'the length may change'
    assert 'absent' not in caplog.text


def test_a_damaged_run_json_does_not_stop_a_run(tmp_path, caplog):
    run = RunDir(tmp_path)
    run.create_or_resume(OLD, {})
    run.info.write_text('{"started": ')
    assert run.create_or_resume(OLD, {})
    assert read_info(run.info)['resumed'] == []
    assert 'run.json could not be read' in caplog.text


def test_the_times_of_starts_add_up(tmp_path, monkeypatch):
    run = RunDir(tmp_path)
    machine = {'command': 'lm train', 'versions': {'jax': '1'}, 'git_commit': 'a', 'device_kind': 'TPU v4'}
    for number, devices in enumerate((8, 8, 16)):
        monkeypatch.setattr(run_info, 'describe_machine', lambda devices=devices: machine | {'device_count': devices})
        run.create_or_resume(OLD, {}, first_step=10 * number)
        write_record(run, 10 * number + 10, OLD)
    starts = json.loads(run.info.read_text())['starts']
    assert [{k: v for k, v in start.items() if k != 'when'} for start in starts] == [
        machine | {'device_count': 8, 'first_step': 0}, {'first_step': 10}, {'device_count': 16, 'first_step': 20},
    ]  # fmt: skip
    found = read_info(run.info)
    assert found | machine | {'device_count': 16, 'saved_step': 20} == found
    assert len(found['resumed']) == 2


def test_the_run_json_of_an_older_version_is_read_and_continued(tmp_path):
    run = RunDir(tmp_path)
    run.create_or_resume(OLD, {})
    old = {'started': 'then', 'resumed': ['later'], 'versions': {'jax': '0.1'}, 'device_kind': 'TPU v3'}
    run.info.write_text(json.dumps(old))
    assert read_info(run.info) == old
    run.create_or_resume(OLD, {})
    new = json.loads(run.info.read_text())
    assert new['started'] == 'then'
    first, second, third = new['starts']
    assert first == {'when': 'then', 'versions': {'jax': '0.1'}, 'device_kind': 'TPU v3'}
    assert second == {'when': 'later'}
    assert third['device_kind'] == 'cpu'
    assert read_info(run.info)['resumed'][0] == 'later'


# Contents that are not trusted.


def write_record(run: RunDir, step: int, config: str | None) -> None:
    """Writes a complete checkpoint, as far as the run directory reads it."""
    folder = run.checkpoints / str(step)
    (folder / 'metadata').mkdir(parents=True)
    metadata = {} if config is None else {'config': config}
    (folder / 'metadata' / 'metadata').write_text(json.dumps(make_record(step, {}, {}, {}, metadata)))
    (folder / COMMITTED).touch()


def contents(run: RunDir) -> dict:
    return {str(p): p.read_bytes() if p.is_file() else None for p in pathlib.Path(run.path).rglob('*')}


def refuse(run: RunDir, error: type, match: str, text: str = OLD, **options) -> None:
    """Checks that both ways refuse and write nothing."""
    before = contents(run)
    for call in (
        lambda: run.check_unchanged(text, options.get('rewound', False)),
        lambda: run.create_or_resume(text, {}, **options),
    ):
        with pytest.raises(error, match=match):
            call()
    assert contents(run) == before


@pytest.mark.parametrize('config', [OLD.replace('degree = 4', 'degree = 8'), '', None, 'not gin at all', b'\xff\xfe'])
def test_the_record_of_a_checkpoint_wins_over_config_gin(tmp_path, config):
    run = RunDir(tmp_path)
    run.create_or_resume(OLD, {})
    write_record(run, 10, OLD)
    if config is None:
        run.config.unlink()
    else:
        run.config.write_bytes(config if isinstance(config, bytes) else config.encode())
    changed = OLD.replace('degree = 4', 'degree = 8')
    refuse(run, MismatchError, r'by the record of 10 in checkpoints\): a/polynomial\.degree was 4, now 8', changed)
    if config != changed:
        assert run.create_or_resume(OLD, {}, first_step=10)
        assert run.config.read_text() == OLD


@pytest.mark.parametrize(
    ('old', 'new', 'remedy'),
    [
        ('steps = 40', 'steps = 80', r'now 80; give the old value, or train on in a new run: `lm train --run_dir '
         r"'\S+ run-80' --branch_from '\S+ run' --step 30 --set train.steps=80`$"),
        ('steps = 40', 'steps = 25', r'--step 20 --set train.steps=25`$'),
        ('steps = 40', 'steps = 20', r'now 20; give the old value, or a new --run_dir$'),
        ('beta2 = 0.9', 'beta2 = 0.8', r'go back to a checkpoint: --rewind_to 30; or give a new --run_dir$'),
        ('= 40\noptimizer.beta2 = 0.9', '= 80\noptimizer.beta2 = 0.8', r'beta2=0.8 --set train.steps=80`$'),
        ('degree = 4', 'degree = 8', r'give the old value, or a new --run_dir$'),
    ],
)  # fmt: skip
def test_a_refused_change_names_what_checkpoints_allow(tmp_path, old, new, remedy):
    text = OLD + 'train.steps = 40\noptimizer.beta2 = 0.9\n'
    run = RunDir(tmp_path / 'the run')
    run.create_or_resume(text, {})
    write_record(run, 20, text)
    write_record(run, 30, text)
    refuse(run, MismatchError, remedy, text.replace(old, new))


def test_an_import_does_not_go_on_and_the_command_can_be_pasted(tmp_path):
    run = RunDir(tmp_path / "a user's folder" / 'tuned')
    run.create_or_resume(OLD, {'imported': 'llama'})
    with pytest.raises(ConfigError, match=r'no optimizer state .* new run from it: `lm train') as refused:
        run.check_unchanged(OLD)
    words = shlex.split(str(refused.value).split('`')[1])
    assert words[2:5] == ['--run_dir', 'NEW', '--gin_file']
    assert words[5:8] == [f'{run.path}/model.gin', '--set', f'train.init_from={run.path}']
    assert write_binding(words[7]) == f'train.init_from = {str(run.path)!r}'


def test_an_export_is_no_run_and_the_way_to_one_is_named(tmp_path, capsys):
    export = tmp_path / 'the export'
    export.mkdir()
    (export / 'config.gin').write_text(OLD)
    (export / 'model.safetensors').touch()
    refuse(RunDir(export), ConfigError, r"and train from it: `lm import '\S+/the export' --run_dir runs/the-export`$")
    file = tmp_path / 'model.gguf'
    file.touch()
    for command in (
        ['train', '--run_dir', str(tmp_path / 'new'), '--branch_from', str(export), '--step', '1'],
        ['distill', '--run_dir', str(tmp_path / 'new'), '--teacher', str(export), '--stage', 'align'],
        ['evaluate', '--run_dir', str(export)],
        ['generate', '--run_dir', str(file)],
        ['inspect', str(export)],
        ['report', str(export), '--out', str(tmp_path / 'out')],
    ):
        assert main(command) == 2
        name = 'model.gguf' if str(file) in command else 'the export'
        assert f"{name}' --run_dir runs/" in capsys.readouterr().err.replace('gguf', "gguf'")
    (export / 'run.json').write_text('{}')
    assert find_import(export) is None, 'a run may hold such files too'


@pytest.mark.parametrize('run_dir', ['../runs/a', 'x/../../runs/a'])
def test_a_run_is_read_by_a_path_with_dots(tmp_path, monkeypatch, run_dir, capsys):
    RunDir(tmp_path / 'runs' / 'a').create_or_resume(Experiment(), {})
    (tmp_path / 'here' / 'x').mkdir(parents=True)
    monkeypatch.chdir(tmp_path / 'here')
    assert load_of_run(run_dir) == Experiment()
    with pytest.raises(ConfigError, match=rf"must not contain '\.\.'; write '{tmp_path}/runs/a'$"):
        RunDir(run_dir)
    with pytest.raises(ConfigError, match=r'write the path without it$'):
        RunDir('gs://bucket/../x')


def test_a_checkpoint_of_an_older_version_still_resumes(tmp_path):
    run = RunDir(tmp_path)
    run.create_or_resume(OLD, {})
    write_record(run, 10, None)
    assert run.create_or_resume(OLD, {}, first_step=10)


def test_fields_that_may_change_may_differ_from_the_checkpoint(tmp_path):
    run = RunDir(tmp_path)
    run.create_or_resume(OLD, {})
    write_record(run, 10, OLD)
    new = OLD.replace('keep_last = 2', 'keep_last = 5')
    for _ in range(2):
        assert run.create_or_resume(new, {}, first_step=10)


def test_a_rewind_is_recorded_and_its_changes_stay(tmp_path):
    run = RunDir(tmp_path)
    old = OLD + 'optimizer.clip_norm = 1.0\n'
    run.create_or_resume(old, {})
    write_record(run, 10, old)
    with run.metrics() as metrics:
        metrics.write(record(25))
    new = old.replace('clip_norm = 1.0', 'clip_norm = 0.5')
    refuse(run, MismatchError, 'clip_norm was 1.0, now 0.5', new)
    assert not run.is_rewound(10, new)
    other = new.replace('degree = 4', 'degree = 8')
    refuse(run, MismatchError, 'degree was 4, now 8', other, first_step=10, rewound=True)
    measured = [run.evaluations / name for name in ('step-10_a.json', 'step-25_a.json', 'harness/step-25_b.json')]
    for path in measured:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{}')
    run.create_or_resume(new, {}, first_step=10, rewound=True)
    assert [path.exists() for path in measured] == [True, False, False], 'of weights that are thrown away'
    assert (run.evaluations / 'step-25_a.json.abandoned').exists()
    (rewind,) = json.loads(run.info.read_text())['rewinds']
    assert rewind == {'when': ANY, 'to': 10, 'from': 25, 'changed': [['optimizer.clip_norm', '1.0', '0.5']]}
    assert run.is_rewound(10, new)
    assert not run.is_rewound(10, old)
    assert not run.is_rewound(5, new)
    assert run.create_or_resume(new, {}, first_step=10), 'preempted before its next checkpoint'
    refuse(run, MismatchError, 'clip_norm was 0.5, now 1.0', old)


def test_a_second_rewind_goes_back_further(tmp_path):
    texts = [f'train.seed = 0\noptimizer.clip_norm = {norm}\n' for norm in (1.0, 0.5, 0.25)]
    run = RunDir(tmp_path)
    run.create_or_resume(texts[0], {})
    for step in (10, 20, 40):
        write_record(run, step, texts[0])
    run.create_or_resume(texts[1], {}, first_step=40, rewound=True)
    run.check_unchanged(texts[1])
    for step in (20, 40):
        shutil.rmtree(run.checkpoints / str(step))
    run.create_or_resume(texts[2], {}, first_step=10, rewound=True)
    run.check_unchanged(texts[2])
    write_record(run, 30, texts[2])  # below the step of the first rewind, and after both
    run.check_unchanged(texts[2])
    refuse(run, MismatchError, 'clip_norm was 0.25, now 0.5', texts[1])


def test_the_same_command_completes_a_killed_rewind(tmp_path, monkeypatch):
    old, run = 'train.seed = 0\noptimizer.clip_norm = 1.0\n', RunDir(tmp_path)
    new = old.replace('1.0', '0.5')
    run.create_or_resume(old, {})
    write_record(run, 10, old)

    written = []

    def write_one(path, text):
        if written:
            raise KeyboardInterrupt
        written.append(write_atomically(path, text))

    with monkeypatch.context() as patched:
        patched.setattr('lm.runs.run_dir.write_atomically', write_one)
        with pytest.raises(KeyboardInterrupt):
            run.create_or_resume(new, {}, first_step=10, rewound=True)
    assert not run.is_rewound(10, new)
    run.create_or_resume(new, {}, first_step=10, rewound=True)
    run.check_unchanged(new)  # as after another kill, before the first save


@pytest.mark.parametrize('name', ['adamw.b2', 'late/linear.final_fraction', 'muon.momentum'])
def test_a_rewind_may_change_the_rule_and_the_schedule(tmp_path, name):
    run = RunDir(tmp_path)
    old, new = (f'{OLD}{name} = {value}\n' for value in (0.25, 0.5))
    run.create_or_resume(old, {})
    write_record(run, 10, old)
    refuse(run, MismatchError, f'{name} was 0.25, now 0.5', new)
    assert run.create_or_resume(new, {}, first_step=10, rewound=True)
    assert run.create_or_resume(new, {}, first_step=10)


@pytest.mark.parametrize('how', ['saved', 'older version', 'no run.json'])
def test_a_run_without_its_checkpoints_is_not_started_again(tmp_path, how):
    run = RunDir(tmp_path)
    text = OLD + 'checkpoint.save_every_steps = 10\n'
    run.create_or_resume(text, {})
    with run.metrics() as metrics:
        for step in range(1, 21):
            metrics.write(record(step))
    if how == 'saved':
        run.record_saved(10)
    elif how == 'older version':
        run.info.write_text(json.dumps({'started': 'then', 'resumed': []}))
    else:
        run.info.unlink()
    refuse(run, MismatchError, r'was saved at step 10, but .*checkpoints holds no checkpoint; mount or restore', text)
    write_record(run, 10, text)
    assert run.create_or_resume(text, {}, first_step=10)


def test_a_run_without_saves_starts_again_with_a_message(tmp_path, caplog):
    run = RunDir(tmp_path)
    run.create_or_resume(OLD, {})
    assert 'starts at step 0' not in caplog.text
    with run.metrics() as metrics:
        metrics.write(record(3))
    run.create_or_resume(OLD, {})
    assert 'starts at step 0 again: no checkpoint was written yet' in caplog.text


def test_a_newest_checkpoint_that_is_gone_is_named(tmp_path, caplog):
    run = RunDir(tmp_path)
    run.create_or_resume(OLD, {})
    run.record_saved(20)
    write_record(run, 10, OLD)
    run.create_or_resume(OLD, {}, first_step=10)
    assert 'step 20 was saved but is gone; going on from step 10' in caplog.text


@pytest.mark.parametrize(
    ('name', 'text'),
    [('config.gin', 'a.b = 3\n'), ('metrics.jsonl', '{"mine": 1}\n'), ('run.json', '{"a": 1}')],
)
def test_a_directory_of_somebody_else_is_left_alone(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    refuse(RunDir(tmp_path), ConfigError, f'its {name} is not of a run of lm train; name another directory')


@pytest.mark.parametrize('name', ['config.gin', 'run.json', 'metrics.jsonl', 'checkpoints'])
def test_the_wrong_kind_of_file_is_named(tmp_path, name):
    run = RunDir(tmp_path)
    run.create_or_resume(OLD, {})
    if name == 'checkpoints':
        (tmp_path / name).rmdir()
        (tmp_path / name).touch()
    else:
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / name).mkdir()
    refuse(run, MismatchError, f'{name}: must be a (file|folder); move it away')


@pytest.mark.parametrize('text', ['[]', '{"started": 1, "starts": [3]}', '\udcff', '{"starts": []}', ''])
def test_a_damaged_run_json_is_written_anew(tmp_path, caplog, text):
    run = RunDir(tmp_path)
    run.create_or_resume(OLD, {})
    run.info.write_bytes(text.encode(errors='surrogateescape'))
    assert read_info(run.info) == {}
    assert run.create_or_resume(OLD, {})
    assert 'run.json could not be read and is written anew' in caplog.text
    assert read_info(run.info)['resumed'] == []


class NoAnswer(Exception):
    """An error like those in packages for buckets, which are not derived from OSError."""


def test_an_unreadable_run_json_in_a_bucket_neither_ends_a_training_nor_starts_one_anew(tmp_path, monkeypatch, caplog):
    run = RunDir(tmp_path)
    run.create_or_resume(OLD, {})
    run.record_saved(10)
    before = run.info.read_bytes()
    real = type(run.info).read_bytes

    def read_bytes(path):
        if path.name == 'run.json':
            raise NoAnswer('503: try again')
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr(type(run.info), 'read_bytes', read_bytes)
        patch.setattr('lm.files.is_remote', lambda path: True)
        for note in (lambda: run.record_saved(20), lambda: run.write_goodput({'share': 0.5})):
            caplog.clear()
            note()
            [warning] = caplog.messages
            assert 'run.json could not be written' in warning
            assert 'NoAnswer: 503: try again' in warning
        for use in (run.read_goodput, lambda: run.check_unchanged(OLD), lambda: read_info(run.info)):
            with pytest.raises(LmError, match=r'run\.json cannot be read .*run the same command again') as refusal:
                use()
            assert refusal.value.exit_code == 1
    assert run.info.read_bytes() == before
    with monkeypatch.context() as patch:
        patch.setattr('lm.files.is_remote', lambda path: True)
        run.info.write_text('{"start')
        assert read_info(run.info) == {}, 'damaged, in a bucket too'


def test_a_full_disk_leaves_whole_lines_and_raises_one_line(tmp_path):
    code = """
import resource, signal, sys
from lm.runs.run_dir import RunDir
from lm.errors import LmError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
run = RunDir(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
with run.metrics() as metrics:
    try:
        for step in range(1, 100):
            metrics.write({'kind': 'train', 'step': step, 'loss': 1.0})
    except LmError as error:
        print(error)
try:
    RunDir(sys.argv[1] + '/new').create_or_resume('# A complete configuration' + 300 * 'x', {})
except LmError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, '-c', code, str(tmp_path)], capture_output=True, text=True, cwd=ROOT)
    assert done.stderr == ''
    first, second = done.stdout.splitlines()
    assert first.startswith(f'{tmp_path}/metrics.jsonl cannot be written (File too large); make room')
    assert second.startswith(f'{tmp_path}/new cannot be written (File too large); make room')
    assert [r['step'] for r in lines(RunDir(tmp_path))] == [1, 2, 3, 4]
    assert [path.name for path in (tmp_path / 'new').iterdir()] == ['checkpoints']


@pytest.mark.parametrize(
    'path', ['../x', 'a/../b', '/tmp/..', 'gs://bucket/../x', 'a\\..\\b', '', ' ', 'a\nb', 'x' * 300, 'http://x/y']
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


def test_good_names_and_paths(monkeypatch):
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name, *_: name)  # as if the packages were there
    for name in ('a', 'run-1.2_x', 'x' * 128):
        assert check_name(name) == name
    for path in ('runs/a', '/tmp/a b', 'gs://bucket/run', './x', '...'):
        check_path(path)
    assert RunDir('runs/a').path.is_absolute()
    assert str(RunDir('gs://bucket/run').checkpoints) == 'gs://bucket/run/checkpoints'


def test_a_file_is_not_a_run_directory(tmp_path):
    (tmp_path / 'file').write_text('')
    with pytest.raises(ConfigError, match='is a file'):
        RunDir(tmp_path / 'file').create_or_resume(OLD, {})


def test_the_git_commit_of_this_checkout_is_found():
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


def test_metrics_covered_by_a_checkpoint_survive_a_crash_of_the_machine(tmp_path, monkeypatch):
    settled, fsync = [], os.fsync
    monkeypatch.setattr(os, 'fsync', lambda number: (fsync(number), settled.append(os.fstat(number).st_size)))
    with metrics_file.MetricsFile(tmp_path / 'metrics.jsonl') as metrics:
        metrics.write({'kind': 'train', 'step': 1, 'loss': 2.0})
        metrics.flush()
        assert (tmp_path / 'metrics.jsonl').stat().st_size in settled


def test_a_last_line_without_its_end_is_cut_off(tmp_path):
    # Otherwise the next record would be appended to the same line.
    (tmp_path / 'metrics.jsonl').write_text(json.dumps(record(1)) + '\n' + json.dumps(record(2)))
    with RunDir(tmp_path).metrics(resume_at=2) as metrics:
        metrics.write(record(3))
    assert [r['step'] for r in lines(RunDir(tmp_path))] == [1, 3]


def test_unreadable_lines_are_removed_and_named(tmp_path, caplog):
    (tmp_path / 'metrics.jsonl').write_text(json.dumps(record(1)) + '\n\x00\x00\n' + json.dumps(record(2)) + '\n')
    RunDir(tmp_path).metrics(resume_at=2).close()
    assert [r['step'] for r in lines(RunDir(tmp_path))] == [1, 2]
    assert 'line 2 is not a record' in caplog.text
    assert [r['step'] for r in read_jsonl(tmp_path / 'metrics.jsonl')] == [1, 2]


@pytest.mark.parametrize(
    'line',
    [b'\xff\xfe', b'[]', b'7', b'{"step": "3", "kind": "train"}', b'{"step": 1e999, "kind": "train"}', b'[' * 100_000,
     b'{"step": true, "kind": "train"}', b'{"step": 2}', b'{"kind": "train", "step": 1, "loss": 9.0}'],
)  # fmt: skip
def test_damaged_metrics_are_repaired_and_kept(tmp_path, caplog, line):
    path = tmp_path / 'metrics.jsonl'
    good = [json.dumps(record(step)).encode() + b'\n' for step in (1, 2, 3)]
    path.write_bytes(good[0] + line + b'\n' + good[1] + good[2])
    assert [r['step'] for r in read_jsonl(path)][-2:] == [2, 3]
    RunDir(tmp_path).metrics(resume_at=2).close()
    assert path.read_bytes() == good[0] + good[1]
    assert (tmp_path / 'metrics.jsonl.damaged').read_bytes() == good[0] + line + b'\n' + good[1] + good[2]
    assert caplog.text.count('WARNING') == 1
    assert 'line 2 is not a record of a new step and is removed; the whole file is kept as' in caplog.text


def test_lines_that_were_lost_since_the_checkpoint_are_counted(tmp_path, caplog):
    path = tmp_path / 'metrics.jsonl'
    with RunDir(tmp_path).metrics() as metrics:
        for step in (1, 2, 3):
            metrics.write(record(step))
        saved = metrics.seal()
    assert saved['metrics_lines'] == 3
    for steps, lost in (((1, 2, 3, 4), 0), ((1, 3), 1), ((), 3)):
        caplog.clear()
        path.write_text(''.join(json.dumps(record(step)) + '\n' for step in steps))
        for sealed in (saved, {}):  # an older version seals nothing
            with RunDir(tmp_path).metrics(resume_at=3) as metrics:
                metrics.warn_of_change(3, sealed)
        assert caplog.text.count('WARNING') == bool(lost)
        assert not lost or f'{lost} of the 3 lines that it had when the checkpoint was saved are gone' in caplog.text


def test_a_digit_that_was_changed_since_a_checkpoint_is_named(tmp_path, caplog):
    path, seals = tmp_path / 'metrics.jsonl', {}
    for first in (0, 4, 8):  # three sessions, of which the second finds the lines of the first
        with RunDir(tmp_path).metrics(resume_at=first) as metrics:
            metrics.warn_of_change(first, seals.get(first, {}))
            for step in range(first + 1, first + 5):
                metrics.write(record(step, loss=2.5))
            seals[first + 4] = metrics.seal()
    assert caplog.text == ''
    found = path.read_bytes().splitlines(keepends=True)
    assert metrics_file.find_change(found, seals) is None
    for number, named in (
        (1, 'lines 1 to 4 has changed since the checkpoint of step 4'),
        (6, 'lines 5 to 8'),
        (12, '9 to 12'),
    ):
        changed = list(found)
        changed[number - 1] = changed[number - 1].replace(b'2.5', b'2.4')
        assert named in metrics_file.find_change(changed, seals)
    path.write_bytes(b''.join(changed[:11]) + found[11].replace(b'2.5', b'2.6'))
    with RunDir(tmp_path).metrics(resume_at=12) as metrics:
        metrics.warn_of_change(12, seals[12])
    assert 'one of its lines 1 to 12 has changed since the checkpoint of step 12 was saved' in caplog.text


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


def test_object_stores_get_whole_files(tmp_path, monkeypatch):
    """A local file takes the code path of gs:// addresses."""
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


def test_a_job_that_lost_the_run_leaves_the_file_to_the_other_one(tmp_path):
    path, owners = tmp_path / 'metrics.jsonl', [True]
    metrics = metrics_file.MetricsFile(path, may_write=lambda: owners[0])
    metrics._file.close()
    metrics._file, metrics._remote = None, True
    metrics.write(record(1))
    metrics.flush()
    owners[0] = False
    path.write_text(''.join(json.dumps(record(step)) + '\n' for step in (1, 2, 3)))
    metrics.write(record(2))
    metrics.close()
    assert [json.loads(line)['step'] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_a_missing_package_means_no_event_files(tmp_path):
    code = f"""
import sys
for name in ('tensorflow', 'clu', 'gin'):
    sys.modules[name] = None
from lm.runs.run_dir import RunDir
run = RunDir({str(tmp_path)!r})
with run.track((), '', True, tensorboard=True) as trackers, run.metrics(trackers=trackers) as metrics:
    metrics.write({{'kind': 'train', 'step': 1, 'loss': 1.0}})
"""
    subprocess.run([sys.executable, '-c', code], check=True, cwd=ROOT)
    assert not (tmp_path / 'tensorboard').exists()
    assert len(lines(RunDir(tmp_path))) == 1


def test_a_file_in_the_place_of_a_run_is_a_wrong_value(tmp_path):
    (tmp_path / 'file').touch()
    for name in ('file', 'file/runs/one'):
        with pytest.raises(ConfigError, match=r'^--run_dir .*: /.*/file is a file; name a new folder'):
            check_path(str(tmp_path / name))
    check_path(str(tmp_path / 'new' / 'run'))
    (tmp_path / 'link').symlink_to(tmp_path)
    check_path(str(tmp_path / 'link'))
