"""A lease has one owner at a time; a dead owner's lease is taken over, a living owner's never."""

import contextlib
import itertools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from lm import lease
from lm.errors import ConfigError
from lm.lease import HeldError, Lease

HOLD = """
import sys
import pathlib
from lm import lease
from lm.errors import ConfigError
lease.HEARTBEAT = 0.1
try:
    with lease.Lease(pathlib.Path(sys.argv[1])):
        print('held', flush=True)
        sys.stdin.read()
except ConfigError as error:
    print('refused', error, flush=True)
"""


END = """
import sys, threading, time
import pathlib
from lm import signals
from lm import lease
lease.HEARTBEAT = 0.001  # it is being renewed at any moment
signals.LAST_ACT_SECONDS = 0.5 if sys.argv[2] == 'hangs' else 50
with lease.Lease(pathlib.Path(sys.argv[1])) as held:
    if sys.argv[2] == 'hangs':
        held._writing.acquire()
        held._store = None
    time.sleep(0.1)
    threading.Thread(target=signals.end_process, args=('over',)).start()
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(lease, 'HEARTBEAT', 0.1)
    monkeypatch.setattr(lease, 'EXPIRES', 0.6)


def hold(path):
    """Starts a process that tries to get the lock, and holds it until its stdin is closed."""
    pipes = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE}
    return subprocess.Popen([sys.executable, '-c', HOLD, str(path)], text=True, **pipes)


def written(path, **changes) -> None:
    """Writes a lock as another process would have left it."""
    with Lease(path):
        owner = json.loads((path / lease.NAME).read_text())
    path.mkdir(exist_ok=True)
    (path / lease.NAME).write_text(json.dumps(owner | changes))


@pytest.mark.smoke
def test_a_second_process_is_refused_and_a_dead_owners_lock_is_taken_over(tmp_path, caplog):
    first = hold(tmp_path)
    assert first.stdout.readline() == 'held\n'
    with pytest.raises(ConfigError) as refusal, Lease(tmp_path):
        pass
    assert f'process {first.pid} on {os.uname().nodename}, started 2' in str(refusal.value)
    assert 'wait for its end or stop it' in str(refusal.value)
    end = time.monotonic() + 10
    while [p.name for p in tmp_path.iterdir()] != [lease.NAME]:  # TensorStore removes its own file a moment later
        assert time.monotonic() < end, list(tmp_path.iterdir())
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.wait()
    with Lease(tmp_path) as second:
        assert second.inherited
        assert json.loads((tmp_path / lease.NAME).read_text())['pid'] == os.getpid()
    assert 'taken over' in caplog.text
    assert 'watching it' not in caplog.text, 'on the same host nobody needs to wait'
    assert not tmp_path.exists(), 'a directory that was made for the lock alone goes with it'


def test_a_killed_process_that_nobody_has_waited_for_is_dead(tmp_path):
    first = hold(tmp_path)
    assert first.stdout.readline() == 'held\n'
    first.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)  # a zombie
    with Lease(tmp_path):
        pass
    first.wait()


@pytest.mark.parametrize(('storage', 'left'), [('works', []), ('hangs', [lease.NAME])])
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
        mine = Lease(tmp_path)
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
    with Lease(tmp_path):
        pass
    assert 'taken over' in caplog.text
    assert 'watching it' not in caplog.text


@pytest.mark.parametrize('changes', [{'host': 'elsewhere'}, {'boot': 'another'}, {'pid_namespace': 'pid:[1]'}])
def test_another_hosts_lock_is_taken_over_once_it_expires(tmp_path, changes, caplog):
    written(tmp_path, **changes, renewed=time.time() + 60)  # never in the past, however slow this machine is
    began = time.monotonic()
    with Lease(tmp_path):
        assert time.monotonic() - began >= lease.EXPIRES
    assert 'watching it' in caplog.text
    assert 'taken over' in caplog.text


def test_the_copy_of_a_running_run_is_free_once_its_lock_expires(tmp_path, caplog):
    (tmp_path / 'run').mkdir()
    with Lease(tmp_path / 'run') as first:
        shutil.copytree(tmp_path / 'run', tmp_path / 'copy')
        with Lease(tmp_path / 'copy'):
            assert 'watching it' in caplog.text
            assert first.lost is None
        with pytest.raises(HeldError, match='works there'), Lease(tmp_path / 'run'):
            pass


def test_a_folder_with_a_new_inode_keeps_its_lock(tmp_path, monkeypatch):
    """Some network file systems change inodes. The lock is still renewed, and so respected."""
    (tmp_path / 'run').mkdir()
    with Lease(tmp_path / 'run'):
        numbers = itertools.count()
        monkeypatch.setattr(lease, '_inode', lambda directory: next(numbers))
        with pytest.raises(HeldError, match='works there'), Lease(tmp_path / 'run'):
            pass


def test_a_renewed_lock_of_another_host_is_respected_whatever_the_clocks_say(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, 'HEARTBEAT', 30.0)  # the lock is renewed while the other process sleeps
    with Lease(tmp_path) as first:
        monkeypatch.setattr(lease.socket, 'gethostname', lambda: 'elsewhere')
        real = time.time
        monkeypatch.setattr(lease.time, 'time', lambda: real() + 3600)  # this clock is an hour ahead
        monkeypatch.setattr(
            lease.time, 'sleep', lambda seconds: setattr(first, '_generation', first._write(first._generation))
        )
        with pytest.raises(HeldError, match='works there'), Lease(tmp_path):
            pass
        assert first.lost is None


def test_the_owner_notices_that_its_folder_was_moved(tmp_path):
    with Lease(tmp_path / 'run') as first:
        (tmp_path / 'run').rename(tmp_path / 'moved')
        (tmp_path / 'run').mkdir()
        first._heart.join(60)
        assert first.lost.startswith('its lock.json is gone: the folder was moved')
    assert (tmp_path / 'moved' / lease.NAME).exists()


def test_the_owner_notices_that_its_lock_was_taken(tmp_path):
    with Lease(tmp_path) as first:
        with first._writing:
            owner = json.loads((tmp_path / lease.NAME).read_text())
            (tmp_path / 'new').write_text(json.dumps(owner | {'host': 'elsewhere', 'uuid': 'another'}))
            (tmp_path / 'new').rename(tmp_path / lease.NAME)
        first._heart.join(60)
        assert first.lost.startswith('another process took it over')
    assert json.loads((tmp_path / lease.NAME).read_text())['host'] == 'elsewhere', "another's lock was removed"


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
        before = json.loads(pathlib.Path(held._file).read_text())['renewed']
        while held._heart.is_alive() and json.loads(pathlib.Path(held._file).read_text())['renewed'] == before:
            time.sleep(0.01)


@pytest.mark.parametrize('answers', [repeated, cut_off])
def test_a_renewal_whose_answer_is_lost_keeps_the_lock(tmp_path, answers):
    with Lease(tmp_path) as held:
        held._write = answers(held._write)
        wait_for_renewals(held)
        assert held.lost is None
    assert not tmp_path.exists(), 'it was given back'


def test_the_first_write_may_lose_its_answer(tmp_path):
    held = Lease(tmp_path)
    held._write = repeated(held._write)
    with held:
        assert held.lost is None
        with pytest.raises(HeldError, match='works there'), Lease(tmp_path):
            pass
    assert not tmp_path.exists(), 'it was given back'


@pytest.mark.parametrize('text', ['', '{"pid": ', '[]', '{}', '\udcff'])
def test_a_damaged_lock_expires(tmp_path, text):
    (tmp_path / lease.NAME).write_text(text, errors='surrogateescape')
    with Lease(tmp_path):
        pass
    assert not tmp_path.exists()


def test_a_folder_that_cannot_be_written_is_an_error_of_the_system(tmp_path):
    (tmp_path / 'file').touch()
    with pytest.raises(NotADirectoryError):
        Lease(tmp_path / 'file' / 'run').__enter__()


def test_who_waits_may_ask_again(tmp_path, caplog, monkeypatch):
    """The owner is on another host and lives: it is watched each time, and this is said once."""
    mine = Lease(tmp_path)
    with Lease(tmp_path):
        monkeypatch.setattr(lease.socket, 'gethostname', lambda: 'elsewhere')
        for _ in range(2):
            with pytest.raises(HeldError):
                mine.__enter__()
    with mine:
        assert not mine.inherited
    assert caplog.text.count('watching it') == 1
