"""One job at a time writes a run directory: its process 0 holds the lease, and all of its processes agree."""

import json
import os

import numpy as np
import pytest

from lm import lease
from lm.errors import ConfigError, LmError, MismatchError
from lm.runs import lock, process_zero
from lm.runs.lock import OccupiedError, RunLock


def test_a_second_training_is_refused(tmp_path):
    with RunLock(tmp_path) as first:
        message = rf'--run_dir {tmp_path}: process {os.getpid()} on .* trains in it; .* choose another --run_dir'
        with pytest.raises(OccupiedError, match=message), RunLock(tmp_path):
            pass
        first.check()
    assert not tmp_path.exists(), 'a directory that was made for the lease alone goes with it'


def test_who_has_lost_the_directory_is_told_before_it_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, 'HEARTBEAT', 0.1)
    with RunLock(tmp_path / 'run') as first:
        (tmp_path / 'run').rename(tmp_path / 'moved')
        first._lease._heart.join(60)
        assert first.is_lost
        with pytest.raises(ConfigError, match=r'its lock.json is gone: the folder was moved, .* is written here'):
            first.check()
    assert (tmp_path / 'moved' / lease.NAME).exists()


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / 'file').touch()
    with pytest.raises(LmError, match=r'its lock\.json cannot be written .* choose a directory'):
        RunLock(tmp_path / 'file' / 'run').__enter__()


@pytest.mark.parametrize(('error', 'code'), [(ConfigError('no'), 2), (MismatchError('no'), 44), (OSError('no'), 1)])
def test_an_error_of_process_0_ends_all_with_its_exit_code(monkeypatch, error, code):
    told = []
    monkeypatch.setattr(process_zero.jax.distributed, 'is_initialized', lambda: True)
    monkeypatch.setattr(process_zero.jax, 'process_count', lambda: 2)
    monkeypatch.setattr(process_zero.multihost_utils, 'broadcast_one_to_all', lambda x: told.append(x) or told[0])

    def fail() -> bool:
        raise error

    monkeypatch.setattr(process_zero.jax, 'process_index', lambda: 0)
    with pytest.raises(type(error)):
        process_zero.run_on_process_zero(fail)
    monkeypatch.setattr(process_zero.jax, 'process_index', lambda: 1)
    with pytest.raises(LmError, match='see its message') as other:
        process_zero.run_on_process_zero(lambda: True)
    assert other.value.exit_code == code


@pytest.fixture
def second_of_two(monkeypatch):
    """Makes this process the second of a job. Process 0 sends the arguments of `leads`, and agrees to everything."""
    monkeypatch.setattr(process_zero.jax.distributed, 'is_initialized', lambda: True)
    monkeypatch.setattr(process_zero.jax, 'process_count', lambda: 2)
    monkeypatch.setattr(process_zero.jax, 'process_index', lambda: 1)
    monkeypatch.setattr(process_zero.multihost_utils, 'process_allgather', lambda mine: np.stack([0 * mine, mine]))

    def leads(*texts: str) -> None:
        data = [np.frombuffer(text.encode(), np.uint8) for text in texts]
        answers = [answer for one in data for answer in (np.int32(len(one)), one)]
        monkeypatch.setattr(process_zero.multihost_utils, 'broadcast_one_to_all', lambda _: answers.pop(0))

    return leads


def test_processes_with_different_settings_do_not_begin(second_of_two):
    mine = {'train.seed': '1', 'train.steps': '7', 'split': ('a', 1)}
    second_of_two(json.dumps(mine), json.dumps(mine | {'train.seed': '0', 'model.remat': "'full'"}))
    process_zero.check_same(mine)
    with pytest.raises(ConfigError) as refused:
        process_zero.check_same(mine)
    assert str(refused.value) == (
        "model.remat: process 1 has None, process 0 has 'full' (and 1 more differ); "
        'start the same command, with the same files, on all of them'
    )


def test_an_error_of_one_process_ends_all_before_they_begin(second_of_two, monkeypatch):
    process_zero.check_all(None)
    monkeypatch.setattr(process_zero.multihost_utils, 'process_allgather', lambda _: np.array([[0], [0], [1]]))
    with pytest.raises(ConfigError, match='process 2 of 3 cannot take part: see its message'):
        process_zero.check_all(None)


def test_a_directory_that_the_hosts_do_not_share_is_refused(second_of_two, monkeypatch, tmp_path):
    """The first save would wait: each host's files would go to its own folder."""
    monkeypatch.setattr(lock, 'SEES', 0.0)
    monkeypatch.setattr(lock, 'run_on_process_zero', lambda work: True)
    of_leader = 'f' * 32
    second_of_two(of_leader, of_leader)
    with pytest.raises(ConfigError, match=r'process 1, on .* does not find there what process 0 writes; name a folder'):
        RunLock(tmp_path).__enter__()
    (tmp_path / lease.NAME).write_text(
        json.dumps({'host': 'a', 'pid': 1, 'since': '', 'boot': '', 'renewed': 0.0, 'uuid': of_leader})
    )
    with RunLock(tmp_path):
        pass
