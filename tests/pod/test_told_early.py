"""SIGTERM and Ctrl-C before a training has anything to save: exit code 42, or 130, from the first line on."""

import pathlib
import signal
import subprocess
import sys
import time

import pytest
import tiny


def wait_for_handler(process: subprocess.Popen) -> None:
    """Waits until the process catches SIGTERM: its first lines have then run."""
    status = pathlib.Path(f'/proc/{process.pid}/status')
    end = time.monotonic() + 60
    while time.monotonic() < end:
        [caught] = [line.split()[1] for line in status.read_text().splitlines() if line.startswith('SigCgt')]
        if int(caught, 16) & 1 << (signal.SIGTERM - 1):
            return
        time.sleep(0.001)
    raise AssertionError('SIGTERM is not caught')


def told(process: subprocess.Popen) -> None:
    code, output = tiny.stop(process, signal.SIGTERM, timeout=60)
    assert code == 42, output
    assert 'run the same command again' in output.splitlines()[-1]
    assert 'Traceback' not in output


@pytest.mark.parametrize('seconds', [0, 0.1, 0.5, 1.5])
def test_a_signal_while_importing_ends_the_training(tiny_flags, tmp_path, seconds):
    process = tiny.start('train', '--run_dir', str(tmp_path / 'run'), *tiny_flags, cold=True)
    wait_for_handler(process)
    time.sleep(seconds)
    told(process)


def test_a_signal_while_it_waits_for_other_processes_ends_the_training(tiny_flags, tmp_path):
    """It waits in C code, where Python's own handlers do not run."""
    others = ['--coordinator_address', f'localhost:{tiny.free_port()}', '--process_count', '2', '--process_id', '1']
    runs = [str(tmp_path / name) for name in 'ab']
    one, two = (tiny.start('train', '--run_dir', run, *tiny_flags, *others, cold=True) for run in runs)
    for process in (one, two):
        wait_for_handler(process)
    time.sleep(8)
    start = time.monotonic()
    told(one)
    code, output = tiny.stop(two, signal.SIGINT, timeout=60)
    assert (code, output.splitlines()[-1]) == (130, 'lm train: interrupted')
    assert time.monotonic() - start < 10


def test_waiting_for_other_processes_has_a_limit(tiny_flags, tmp_path):
    others = ['--coordinator_address', f'localhost:{tiny.free_port()}', '--process_count', '2', '--process_id', '1']
    done = tiny.lm('train', '--run_dir', str(tmp_path), *tiny_flags, *others, '--gin_param', 'mesh.join_seconds = 1')
    assert done.returncode == 42
    assert done.stderr == (
        'lm: the other processes have not joined within 1 s (mesh.join_seconds): '
        'run the same command again on all of them\n'
    )


def test_a_signal_after_the_processes_have_met_ends_the_training_at_once():
    """JAX's own handler would wait for the next step. If another process was stopped earlier, that step never comes."""
    code = """
import os, signal, sys, time
from lm.signals import end_on_signals
from lm.pod.job import JobAddress, initialize_distributed
from lm.pod.mesh import MeshConfig
end_on_signals('lm train')
initialize_distributed(MeshConfig(), JobAddress(f'localhost:{sys.argv[1]}', 1, 0))
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""
    command = [sys.executable, '-c', code, str(tiny.free_port())]
    assert subprocess.run(command, env=tiny.environment(), cwd=tiny.ROOT, timeout=50).returncode == 42


def test_another_program_that_imports_lm_keeps_its_signals():
    code = 'import signal, lm.cli; assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL'
    subprocess.run([sys.executable, '-c', code], env=tiny.environment(), cwd=tiny.ROOT, check=True)
