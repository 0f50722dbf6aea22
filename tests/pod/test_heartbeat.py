"""A process of a job that dies, freezes or fails ends the others: soon, in one line, with the right exit code."""

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import tiny

from lm.pod import heartbeat
from lm.pod.heartbeat import Peers

HEARTBEAT = 4.0
SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)

JOB = """
import os, socket, sys, time
from jax._src.distributed import global_state
from jax.experimental import multihost_utils
from lm.errors import Diverged, MismatchError
from lm.pod.job import JobAddress, initialize_distributed
from lm.pod.mesh import MeshConfig
from lm.pod import heartbeat as peers
from lm.pod.heartbeat import Peers

address, index, case = sys.argv[1], int(sys.argv[2]), sys.argv[3]
initialize_distributed(MeshConfig(heartbeat_seconds=4.0), JobAddress(address, 3, index), meets=False)
peers.CONNECT_SECONDS = 4.0
store = global_state.client
store.key_value_set(f'joined/{index}', 'yes')
if case == f'gone {index}':
    for other in range(3):  # who has not joined when process 0 ends waits for `mesh.join_seconds`
        store.blocking_key_value_get(f'joined/{other}', 60_000)
    time.sleep(1)  # until the last one has heard that its word was taken
    os._exit(1)
if case == f'unreachable {index}':
    def refuse(*_, **__):
        raise OSError('no route to host')
    socket.create_connection = socket.create_server = refuse
try:
    with Peers(4.0):
        if case == f'leaves {index}':
            os._exit(1)
        for n in range(100_000):
            multihost_utils.sync_global_devices('step')
            if n == 5:
                print('running', flush=True)
                if case == 'all diverge':
                    raise Diverged('all of them')
                if case == 'all done' or case.startswith('unreachable'):
                    break
                if case == 'one refuses' and index == 1:
                    raise MismatchError('mine alone')
            time.sleep(0.02)
except (Diverged, MismatchError) as error:
    print(error, flush=True)
    sys.exit(error.exit_code)
"""


@contextlib.contextmanager
def job(*command: str, count: int):
    """Starts `count` processes of a command; {address} is process 0's address, and {index} each process's own
    number."""
    address = f'localhost:{tiny.free_port()}'
    processes = [
        subprocess.Popen(
            [part.replace('{address}', address).replace('{index}', str(index)) for part in command],
            env=tiny.environment(PYTHONUNBUFFERED='1'),
            cwd=tiny.ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(count)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()


def small_job(case: str):
    return job(sys.executable, '-c', JOB, '{address}', '{index}', case, count=3)


def wait_until_running(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        assert any('running' in line for line in process.stdout), 'did not start'


def ends(processes: list[subprocess.Popen], within: float) -> list[tuple[int, str]]:
    """Returns (exit code, output) of each process."""
    end = time.monotonic() + within
    found = []
    for process in processes:
        output, _ = process.communicate(timeout=max(0.1, end - time.monotonic()))
        found.append((process.returncode, output))
    return found


@pytest.mark.parametrize('victim', [0, SLOW(2)])  # after the coordinator's death the others learn of it in another way
def test_after_a_sigkill_the_others_end_with_42(victim):
    with small_job('run') as processes:
        wait_until_running(processes)
        processes[victim].kill()
        others = [p for i, p in enumerate(processes) if i != victim]
        for code, output in ends(others, within=HEARTBEAT + 5):
            assert code == 42, output
            assert 'is gone: run the same command again' in output


@pytest.mark.parametrize('victim', [SLOW(0), 1])
def test_a_frozen_host_is_detected_by_its_silence(victim):
    with small_job('run') as processes:
        wait_until_running(processes)
        os.kill(processes[victim].pid, signal.SIGSTOP)
        others = [p for i, p in enumerate(processes) if i != victim]
        for code, output in ends(others, within=HEARTBEAT + 5):
            assert code == 42, output
            assert 'run the same command again' in output


@pytest.mark.parametrize(('case', 'expected'), [('all diverge', 43), SLOW('all done', 0)])
def test_processes_that_all_end_are_not_reported_as_gone(case, expected):
    with small_job(case) as processes:
        wait_until_running(processes)
        for code, output in ends(processes, within=20):
            assert code == expected, output
            assert 'is gone' not in output


@pytest.mark.parametrize('case', ['gone 0', SLOW('gone 2'), SLOW('leaves 0'), 'leaves 2'])
def test_a_death_before_the_processes_have_met_ends_the_others_with_42(case):
    """The process had joined the job. It was told to stop before it had connected, or before it had reported its
    devices."""
    with small_job(case) as processes:
        found = ends(processes, within=60)
    for index, (code, output) in enumerate(found):
        assert code == (1 if case.endswith(str(index)) else 42), output
        assert code == 1 or 'is gone: run the same command again' in output


@pytest.mark.parametrize('index', [0, SLOW(1)])
def test_an_unreachable_process_is_not_watched(index):
    with small_job(f'unreachable {index}') as processes:
        found = ends(processes, within=60)
    assert [code for code, _ in found] == [0, 0, 0], found
    assert f'process {index} cannot watch the others (no route to host): JAX will, later' in found[index][1]


def test_an_error_of_one_process_is_the_exit_code_of_all():
    """A repetition of the job would not help, and no process waits for a process that has given up."""
    with small_job('one refuses') as processes:
        wait_until_running(processes)
        found = ends(processes, within=2 * HEARTBEAT + 10)
    assert [code for code, _ in found] == [44, 44, 44], found
    assert 'mine alone' in found[1][1]
    assert 'process 1 of 3 ended with exit code 44' in found[0][1]


@pytest.mark.parametrize('victim', [SLOW(0), 1])
def test_a_training_survives_the_death_of_a_process(tiny_flags, tmp_path, victim):
    """The survivor ends with 42. The same command then continues from the last checkpoint. Each process is a slice."""
    settings = {'mesh.heartbeat_seconds': HEARTBEAT, 'mesh.slices': 2, 'train.steps': 4000}
    flags = [*tiny_flags, *tiny.params(settings)]
    command = [sys.executable, '-m', 'lm.cli', 'train', '--run_dir', str(tmp_path / 'run'), *flags]
    command += ['--coordinator_address', '{address}', '--process_count', '2', '--process_id', '{index}']
    with job(*command, count=2) as processes:
        tiny.wait_for_step(tmp_path / 'run', 45, processes[0])
        processes[victim].kill()
        [(code, output)] = ends([processes[1 - victim]], within=HEARTBEAT + 5)
        assert code == 42, output
        assert f'process {victim} of 2 is gone' in output
    with job(*command, count=2) as processes:
        lines = []
        for line in processes[0].stdout:
            lines.append(line)
            if 'resumed from step' in line:
                break
        else:
            pytest.fail(''.join(lines)[-3000:])


class Store:
    """Stands in for the store of jax.distributed."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, name, value, allow_overwrite=False):
        self.values[name] = value

    def key_value_dir_get(self, name):
        return [(key, value) for key, value in self.values.items() if key.startswith(name) and key != 'lm/peers/0']


def test_strangers_who_connect_hold_up_and_end_nobody(monkeypatch):
    """They stay silent, send no UTF-8, an endless line, a wrong secret, or a right one in pieces."""
    monkeypatch.setattr(heartbeat, 'joined', lambda: (0, 3))
    peers, store, server = Peers(60.0), Store(), socket.create_server(('127.0.0.1', 0))
    accepting = threading.Thread(target=peers._accept, args=(server, store))
    accepting.start()
    while 'lm/peers/0' not in store.values:
        time.sleep(0.01)
    port, secret = store.values['lm/peers/0'].split()
    texts = b'', b'\xff 1\n', 'é 1\n'.encode(), b'x' * 5000, b'\n', b'0 1\n', b'a', f'{secret} 7\n'.encode()
    strangers = [socket.create_connection(('127.0.0.1', int(port))) for _ in texts]
    for stranger, text in zip(strangers, texts, strict=True):
        stranger.sendall(text)
    first, second = (socket.create_connection(('127.0.0.1', int(port))) for _ in range(2))
    first.sendall(f'{secret} 1\nbeat\nend 1 0\nbe'.encode())
    for piece in (secret[:5], secret[5:], ' 2', '\n'):
        second.sendall(piece.encode())
        time.sleep(0.02)
    accepting.join(timeout=20)
    assert not accepting.is_alive()
    assert set(peers._connections) == {1, 2}
    assert peers._connections[1].rest == b'beat\nend 1 0\nbe'
    assert peers._connections[2].rest == b''
    for other in (*strangers, first, second, server, *(one.socket for one in peers._connections.values())):
        other.close()
