"""Secrets stand in no file, message or page."""

import logging
import pathlib

import pytest
import tiny

from lm.config.load import load
from lm.config.text import dump
from lm.errors import ConfigError
from lm.experiment import Experiment
from lm.secrets import Secret, hide_secrets, list_variables, redact, reveal
from lm.sweep.manifests.base import ClusterJob
from lm.sweep.manifests.jobset import make_container
from lm.sweep.options import ClusterOptions
from lm.trackers.webhook import Webhook

KEY = 'PLANTED' + 'KEY'  # this file does not hold it
ADDRESS = f'http://user:{KEY}@127.0.0.1:9/hooks/{KEY}'
WITH_SECRET = ['--set', 'train.trackers=[@webhook()]', '--gin_param', f"webhook.url = '{ADDRESS}'"]


@pytest.fixture(autouse=True)
def no_secrets_of_others(monkeypatch):
    monkeypatch.setattr(Secret, 'known', {})


SHORT = ['--set', 'train.steps=2', '--set', 'optimizer.warmup_steps=1']


def files_with_key(folder: pathlib.Path) -> list[str]:
    return [str(path) for path in folder.rglob('*') if path.is_file() and KEY.encode() in path.read_bytes()]


def test_texts_show_the_variable_and_the_tracker_gets_the_value():
    hook = Webhook(url=ADDRESS)
    assert reveal(hook.url) == ADDRESS
    for shown in (
        repr(hook),
        str(hook.url),
        f'{hook.url}',
        dump(load([], [f'webhook.url = {ADDRESS!r}', 'train.trackers = [@webhook()]'], root=Experiment)),
    ):
        assert KEY not in shown
        assert '$LM_WEBHOOK' in shown
    assert list_variables() == {'LM_WEBHOOK': ADDRESS}
    assert redact(f'cannot reach {ADDRESS}') == 'cannot reach $LM_WEBHOOK'


def test_a_variable_stays_what_it_is(monkeypatch):
    monkeypatch.setenv('MINE', ADDRESS)
    assert reveal(Webhook(url='$MINE').url) == ADDRESS
    assert Webhook(url='$MINE').url == '$MINE'
    assert list_variables() == {}


def test_a_wrong_secret_is_not_shown():
    with pytest.raises(ConfigError) as error:
        Webhook(url=f'ftp://{KEY}')
    assert KEY not in str(error.value)


def test_lines_of_the_log_show_the_variable():
    hook = Webhook(url=ADDRESS)
    record = logging.LogRecord('lm', logging.WARNING, '', 0, 'no answer from %s', (reveal(hook.url),), None)
    assert hide_secrets(record)
    assert record.getMessage() == 'no answer from $LM_WEBHOOK'


def test_no_file_of_a_run_and_its_export_keeps_a_planted_secret(tiny_flags, tmp_path):
    run = tmp_path / 'run'
    done = tiny.lm(
        'train',
        '--run_dir',
        str(run),
        *tiny_flags,
        *WITH_SECRET,
        '--set',
        'train.steps=2',
        '--set',
        'optimizer.warmup_steps=1',
    )
    assert done.returncode == 0, done.stderr
    exported = tiny.lm('export', '--run_dir', str(run), '--format', 'safetensors', '--out', str(tmp_path / 'export'))
    assert exported.returncode == 0, exported.stderr
    assert files_with_key(tmp_path) == []
    assert KEY not in done.stdout + done.stderr + exported.stdout + exported.stderr
    assert 'LM_WEBHOOK' in (run / 'config.gin').read_text()


def test_no_file_of_a_sweep_and_its_manifests_keeps_a_planted_secret(tiny_flags, tmp_path):
    """The points of a sweep on this machine get the address, and pods the variables of a Secret."""
    sweep_file = tmp_path / 'rates.gin'
    sweep_file.write_text('optimizer.weight_decay = [0.0, 0.1]\n')
    flags = ['--sweep_file', str(sweep_file), *tiny_flags, *WITH_SECRET, *SHORT]
    emitted = tiny.lm('sweep', '--run_dir', str(tmp_path / 'slurm'), *flags, '--emit', 'slurm', str(tmp_path / 'jobs'))
    assert emitted.returncode == 0, emitted.stderr
    here = tiny.lm('sweep', '--run_dir', str(tmp_path / 'here'), *flags)
    assert here.returncode == 0, here.stderr
    assert files_with_key(tmp_path) == []
    logs = ''.join(path.read_text() for path in (tmp_path / 'here').rglob('*.log'))
    assert 'Connection refused' in logs, 'the points have not tried the address'


def test_pods_get_the_variables_of_a_secret():
    options = ClusterOptions(image='image', gpus='1', secret='keys')
    container = make_container(ClusterJob('name', 'point', 0, 'gs://b/s'), options)
    assert container['envFrom'] == [{'secretRef': {'name': 'keys'}}]
