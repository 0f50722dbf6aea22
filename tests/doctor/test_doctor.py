"""lm doctor: it names what is wrong, hangs with nothing, writes nothing that stays, and prints no secret."""

import json
import os
import threading

import pytest
import tiny

from lm.doctor import doctor, machine, place
from lm.doctor.finding import Examination, Weight
from lm.errors import ConfigError


def examine(path) -> dict[str, list]:
    """Returns subject → the findings of the checks of a place."""
    found = {}
    for check in place.make_checks(str(path)):
        for finding in doctor.run_check(check):
            found.setdefault(finding.subject, []).append(finding)
    return found


def weights(found) -> set[Weight]:
    return {finding.weight for findings in found.values() for finding in findings}


def test_a_folder_that_can_be_written_stays_as_it_was(tmp_path):
    found = examine(tmp_path)
    assert weights(found) == {Weight.FINE}
    assert 'can be written' in found['storage'][0].text
    assert 'agrees' in found['clock'][0].text
    assert list(tmp_path.iterdir()) == []
    found = examine(tmp_path / 'not' / 'yet')
    assert str(tmp_path) in found['storage'][0].text
    assert list(tmp_path.iterdir()) == []


def test_an_address_that_no_command_reads_is_refused():
    with pytest.raises(ConfigError, match='ftp'):
        place.make_checks('ftp://machine/runs')


def test_links_and_pipes_of_others_are_named(tmp_path):
    os.mkfifo(tmp_path / 'metrics.jsonl')
    (tmp_path / 'compiled').symlink_to('/somewhere')
    (rights,) = examine(tmp_path)['rights']
    assert rights.weight is Weight.DOUBT
    assert 'compiled is a link to /somewhere (and 1 more)' in rights.text
    (tmp_path / 'compiled').unlink()
    (tmp_path / 'metrics.jsonl').unlink()
    tmp_path.chmod(0o777)
    found = examine(tmp_path)['rights']
    assert 'others can change it' in found[0].text
    assert found[0].remedy.startswith('chmod')


def test_an_export_is_no_run_without_a_checkpoint(tmp_path):
    for name in ('config.gin', 'model.safetensors'):
        (tmp_path / name).touch()
    (found,) = examine(tmp_path)['run']
    assert found.weight is Weight.FINE
    assert f'lm import {tmp_path} --run_dir' in found.text


def test_a_storage_whose_clock_differs_is_named(tmp_path, monkeypatch):
    now = place.time.time
    monkeypatch.setattr(place.time, 'time', lambda: now() + 60)
    (clock,) = examine(tmp_path)['clock']
    assert clock.weight is Weight.DOUBT
    assert 'differs by -6' in clock.text


def test_a_run_is_described_and_a_planted_folder_in_memory_is_bad(tiny_flags, tmp_path, monkeypatch):
    run, memory = tmp_path / 'run', tmp_path / 'memory'
    assert tiny.lm('train', '--run_dir', str(run), *tiny_flags).returncode == 0
    memory.mkdir()
    monkeypatch.setattr('lm.checkpoint.shared_memory.FOLDER', memory)
    found = examine(run)
    assert weights(found) == {Weight.FINE}
    assert 'its newest checkpoint is step 40' in found['run'][0].text
    place.SharedMemory(run, '').folder.symlink_to(tmp_path)
    found = examine(run)
    assert found['run'][-1].weight is Weight.WRONG
    assert str(memory) in found['run'][-1].text
    (run / 'lock.json').write_text('{}')
    assert 'metrics' not in str(examine(run)['run'])


def test_a_store_is_read_and_not_written(tmp_path):
    store = tiny.prepare(tmp_path)
    before = sorted(path.name for path in store.iterdir())
    found = examine(store)
    assert weights(found) == {Weight.FINE}
    assert ' in validation' in found['store'][0].text
    assert sorted(path.name for path in store.iterdir()) == before
    (store / 'dataset.json').write_text('{"version": [')
    assert Weight.WRONG in weights(examine(store))


def test_a_check_that_hangs_ends(capsys):
    def hang():
        yield doctor.wrong('bucket', 'something', 'something')
        threading.Event().wait()

    first, last = doctor.run_check(Examination('bucket', hang, 0.2))
    assert first.text == 'something'
    assert 'no answer within' in last.text


def test_the_kernel_and_the_environment_are_named_without_secrets(monkeypatch, capsys):
    for name in (*machine.KEYS, 'AWS_ACCESS_KEY_ID'):
        monkeypatch.setenv(name, 'PLANTED' + 'KEY')
    monkeypatch.setenv('GOOGLE_APPLICATION_CREDENTIALS', '/PLANTED' + 'KEY')
    monkeypatch.setenv('XLA_FLAGS', '--xla_dump_to=x')
    monkeypatch.setattr(machine, 'check_devices', lambda: iter(()))
    monkeypatch.setattr(machine, 'PROTECTIONS', ('no_such_setting',))
    assert doctor.examine([], as_json=True) == 1
    out = capsys.readouterr().out
    found = json.loads(out)['findings']
    assert 'PLANTED' + 'KEY' not in out
    texts = {finding['text']: finding['weight'] for finding in found if finding['subject'] == 'variables'}
    assert texts['WANDB_API_KEY is set'] == 'ok'
    assert texts['XLA_FLAGS=--xla_dump_to=x'] == 'ok'
    assert texts['GOOGLE_APPLICATION_CREDENTIALS names a file that is not there'] == 'bad'


def test_a_driver_that_hangs_or_fails_is_named(monkeypatch):
    monkeypatch.setattr(machine, 'LIST_DEVICES', 'raise SystemExit("the chip is in use")')
    (finding,) = machine.check_devices()
    assert finding.weight is Weight.WRONG
    assert 'the chip is in use' in finding.text
    monkeypatch.setattr(machine, 'LIST_DEVICES', 'import time; time.sleep(60)')
    monkeypatch.setattr(machine, 'DEVICE_SECONDS', 0.3)
    (finding,) = machine.check_devices()
    assert 'has not found its devices' in finding.text


def test_the_command_prints_each_finding(tmp_path):
    done = tiny.lm('doctor', str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f'ok    storage    {tmp_path} can be written' in done.stdout
    assert '1 × cpu' in done.stdout
    assert ' bad, ' in done.stderr
