"""SIGTERM before a training has anything to save: exit code 42 from the first line on."""

import pathlib
import signal
import subprocess
import sys
import time

import pytest
import tiny


def wait_for_handler(process: subprocess.Popen) -> None:
    """Until the process catches SIGTERM: its first lines have run."""
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
def test_while_importing(tiny_flags, tmp_path, seconds):
    process = tiny.start('train', '--run_dir', str(tmp_path / 'run'), *tiny_flags, cold=True)
    wait_for_handler(process)
    time.sleep(seconds)
    told(process)


def test_while_it_waits_for_the_other_processes(tiny_flags, tmp_path):
    """In C code, where Python's own handlers do not run."""
    others = ['--coordinator_address', 'localhost:39071', '--process_count', '2', '--process_id', '1']
    process = tiny.start('train', '--run_dir', str(tmp_path / 'run'), *tiny_flags, *others, cold=True)
    wait_for_handler(process)
    time.sleep(8)
    start = time.monotonic()
    told(process)
    assert time.monotonic() - start < 10


def test_another_program_that_imports_lm_keeps_its_signals():
    code = 'import signal, lm.cli; assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL'
    subprocess.run([sys.executable, '-c', code], env=tiny.environment(), cwd=tiny.ROOT, check=True)
