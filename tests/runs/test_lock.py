"""The lock of a run directory has one owner at a time; a dead owner's lock is taken over, a living owner's never."""

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from lm.errors import ConfigError, LmError, MismatchError
from lm.runs import lock, process_zero
from lm.runs.lock import RunLock

HOLD = """
import sys
from etils import epath
from lm.runs import lock
from lm.errors import ConfigError
lock.HEARTBEAT = 0.1
try:
    with lock.RunLock(epath.Path(sys.argv[1])):
        print('held', flush=True)
        sys.stdin.read()
except ConfigError as error:
    print('refused', error, flush=True)
"""


END = """
import sys, threading, time
from etils import epath
from lm import signals
from lm.runs import lock
lock.HEARTBEAT = 0.001  # it is being renewed at any moment
signals.LAST_ACT_SECONDS = 0.5 if sys.argv[2] == 'hangs' else 50
with lock.RunLock(epath.Path(sys.argv[1])) as held:
    if sys.argv[2] == 'hangs':
        held._writing.acquire()
        held._store = None
    time.sleep(0.1)
    threading.Thread(target=signals.end_process, args=('over',)).start()
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(lock, 'HEARTBEAT', 0.1)
    monkeypatch.setattr(lock, 'EXPIRES', 0.6)


def hold(path):
    """Starts a process that tries to get the lock, and holds it until its stdin is closed."""
    pipes = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE}
    return subprocess.Popen([sys.executable, '-c', HOLD, str(path)], text=True, **pipes)


def written(path, **changes) -> None:
    """Writes a lock as another process would have left it."""
    with RunLock(path):
        owner = json.loads((path / lock.NAME).read_text())
    path.mkdir(exist_ok=True)
    (path / lock.NAME).write_text(json.dumps(owner | changes))


@pytest.mark.smoke
def test_a_second_process_is_refused_and_a_dead_owners_lock_is_taken_over(tmp_path, caplog):
    first = hold(tmp_path)
    assert first.stdout.readline() == 'held\n'
    with pytest.raises(ConfigError) as refusal, RunLock(tmp_path):
        pass
    assert f'process {first.pid} on {os.uname().nodename}, started 2' in str(refusal.value)
    assert 'choose another --run_dir' in str(refusal.value)
    end = time.monotonic() + 10
    while [p.name for p in tmp_path.iterdir()] != [lock.NAME]:  # TensorStore removes its own file a moment later
        assert time.monotonic() < end, list(tmp_path.iterdir())
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.wait()
    with RunLock(tmp_path):
        assert json.loads((tmp_path / lock.NAME).read_text())['pid'] == os.getpid()
    assert 'taken over' in caplog.text
    assert 'watching it' not in caplog.text, 'on the same host nobody needs to wait'
    assert not tmp_path.exists(), 'a directory that was made for the lock alone goes with it'


def test_a_killed_process_that_nobody_has_waited_for_is_dead(tmp_path):
    first = hold(tmp_path)
    assert first.stdout.readline() == 'held\n'
    first.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)  # a zombie
    with RunLock(tmp_path):
        pass
    first.wait()


@pytest.mark.parametrize(('storage', 'left'), [('works', []), ('hangs', [lock.NAME])])
def test_an_exit_from_any_thread_releases_the_lock_unless_storage_hangs(tmp_path, storage, left):
    """One case is the survivor of a job whose host died: the job is repeated at once, maybe on another host."""
    began = time.monotonic()
    ended = subprocess.run([sys.executable, '-c', END, str(tmp_path), storage], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (42, 'over\n')
    assert [p.name for p in tmp_path.iterdir()] == left
    assert time.monotonic() - began < 55


def test_one_of_several_simultaneous_processes_gets_the_lock(tmp_path):
    processes = [hold(tmp_path) for _ in range(4)]
    words = [process.stdout.readline().split()[0] for process in processes]
    for process in processes:
        process.communicate()
    assert sorted(words) == ['held', 'refused', 'refused', 'refused']


def test_one_of_many_threads_gets_the_lock(tmp_path):
    """This tests the conditional write: all threads have seen that there is no lock."""
    (tmp_path / 'file').touch()
    held, gate, done = [], threading.Barrier(8), threading.Barrier(8)

    def work():
        mine = RunLock(tmp_path)
        gate.wait()
        with contextlib.suppress(ConfigError), mine:
            held.append(mine)
            done.wait()
            return
        done.wait()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(held) == 1


@pytest.mark.parametrize('changes', [{'pid_started': '1'}, {'boot': 'another', 'renewed': 1e9}])
def test_the_lock_of_a_reused_process_id_or_of_an_earlier_boot_is_taken_over(tmp_path, changes, caplog):
    written(tmp_path, **changes)
    with RunLock(tmp_path):
        pass
    assert 'taken over' in caplog.text
    assert 'watching it' not in caplog.text


@pytest.mark.parametrize('changes', [{'host': 'elsewhere'}, {'boot': 'another'}, {'pid_namespace': 'pid:[1]'}])
def test_another_hosts_lock_is_taken_over_once_it_expires(tmp_path, changes, caplog):
    written(tmp_path, **changes, renewed=time.time() + 60)  # never in the past, however slow this machine is
    began = time.monotonic()
    with RunLock(tmp_path):
        assert time.monotonic() - began >= lock.EXPIRES
    assert 'watching it' in caplog.text
    assert 'taken over' in caplog.text


def test_the_copy_of_a_running_run_is_free_once_its_lock_expires(tmp_path, caplog):
    (tmp_path / 'run').mkdir()
    with RunLock(tmp_path / 'run') as first:
        shutil.copytree(tmp_path / 'run', tmp_path / 'copy')
        with RunLock(tmp_path / 'copy'):
            assert 'watching it' in caplog.text
            first.check()
        with pytest.raises(ConfigError, match='trains in it'), RunLock(tmp_path / 'run'):
            pass


def test_a_folder_with_a_new_inode_keeps_its_lock(tmp_path, monkeypatch):
    """Some network file systems change inodes. The lock is still renewed, and so respected."""
    (tmp_path / 'run').mkdir()
    with RunLock(tmp_path / 'run'):
        numbers = itertools.count()
        monkeypatch.setattr(lock, '_inode', lambda directory: next(numbers))
        with pytest.raises(ConfigError, match='trains in it'), RunLock(tmp_path / 'run'):
            pass


def test_a_renewed_lock_of_another_host_is_respected_whatever_the_clocks_say(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, 'HEARTBEAT', 30.0)  # the lock is renewed while the other process sleeps
    with RunLock(tmp_path) as first:
        monkeypatch.setattr(lock.socket, 'gethostname', lambda: 'elsewhere')
        real = time.time
        monkeypatch.setattr(lock.time, 'time', lambda: real() + 3600)  # this clock is an hour ahead
        monkeypatch.setattr(
            lock.time, 'sleep', lambda seconds: setattr(first, '_generation', first._write(first._generation))
        )
        with pytest.raises(ConfigError, match='trains in it'), RunLock(tmp_path):
            pass
        first.check()


def test_the_owner_notices_that_its_folder_was_moved(tmp_path):
    with RunLock(tmp_path / 'run') as first:
        (tmp_path / 'run').rename(tmp_path / 'moved')
        (tmp_path / 'run').mkdir()
        first._heart.join(60)
        with pytest.raises(ConfigError, match=r'its lock.json is gone: the folder was moved, .* is written here'):
            first.check()
    assert (tmp_path / 'moved' / lock.NAME).exists()


def test_the_owner_notices_that_its_lock_was_taken(tmp_path):
    with RunLock(tmp_path) as first:
        with first._writing:
            owner = json.loads((tmp_path / lock.NAME).read_text())
            (tmp_path / 'new').write_text(json.dumps(owner | {'host': 'elsewhere', 'uuid': 'another'}))
            (tmp_path / 'new').rename(tmp_path / lock.NAME)
        first._heart.join(60)
        with pytest.raises(ConfigError, match='took it over'):
            first.check()
    assert json.loads((tmp_path / lock.NAME).read_text())['host'] == 'elsewhere', "another's lock was removed"


def repeated(write):
    """Acts like a cloud client that has repeated a write whose answer was lost."""

    def twice(generation):
        write(generation)
        return write(generation)

    return twice


def cut_off(write):
    """Acts like a client that gives up, every second time."""
    fails = itertools.cycle([True, False])

    def once(generation):
        generation = write(generation)
        if next(fails):
            raise ValueError('UNAVAILABLE: no answer')
        return generation

    return once


def wait_for_renewals(held, number=4):
    """Waits for this number of heartbeats, or until the heartbeat has ended."""
    for _ in range(number):
        before = json.loads((held.directory / lock.NAME).read_text())['renewed']
        while held._heart.is_alive() and json.loads((held.directory / lock.NAME).read_text())['renewed'] == before:
            time.sleep(0.01)


@pytest.mark.parametrize('answers', [repeated, cut_off])
def test_a_renewal_whose_answer_is_lost_keeps_the_lock(tmp_path, answers):
    with RunLock(tmp_path) as held:
        held._write = answers(held._write)
        wait_for_renewals(held)
        held.check()
    assert not tmp_path.exists(), 'it was given back'


def test_the_first_write_may_lose_its_answer(tmp_path):
    held = RunLock(tmp_path)
    held._write = repeated(held._write)
    with held:
        held.check()
        with pytest.raises(ConfigError, match='trains in it'), RunLock(tmp_path):
            pass
    assert not tmp_path.exists(), 'it was given back'


@pytest.mark.parametrize('text', ['', '{"pid": ', '[]', '{}', '\udcff'])
def test_a_damaged_lock_expires(tmp_path, text):
    (tmp_path / lock.NAME).write_text(text, errors='surrogateescape')
    with RunLock(tmp_path):
        pass
    assert not tmp_path.exists()


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
    (tmp_path / lock.NAME).write_text(
        json.dumps({'host': 'a', 'pid': 1, 'since': '', 'boot': '', 'renewed': 0.0, 'uuid': of_leader})
    )
    with RunLock(tmp_path):
        pass
