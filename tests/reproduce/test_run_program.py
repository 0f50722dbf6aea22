"""A program that `lm reproduce` waits for: a signal reaches it, and it ends before `lm reproduce` does."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest
import tiny

from lm.errors import Preempted
from lm.reproduce.program import run_program

SAVES = """
import pathlib, signal, sys, time
def save(*_):
    pathlib.Path('saved').touch()
    sys.exit(3)
signal.signal(signal.SIGTERM, save)
pathlib.Path('ready').touch()
time.sleep(60)
"""


def wait_for(path: pathlib.Path) -> None:
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, f'{path.name}: never came'
        time.sleep(0.01)


def test_the_exit_code_is_that_of_the_program():
    command = [sys.executable, '-S', '-c', 'import os; raise SystemExit(int(os.environ["CODE"]))']
    assert [run_program(command, {'CODE': code}) for code in ('0', '7')] == [0, 7]


def test_a_program_that_is_preempted_is_no_failure():
    with pytest.raises(Preempted, match='run the same command again'):
        run_program([sys.executable, '-S', '-c', 'raise SystemExit(42)'])


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_the_program_to_save_and_is_waited_for(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(number)

    def stop() -> None:
        wait_for(tmp_path / 'ready')
        os.kill(os.getpid(), number)

    threading.Thread(target=stop, daemon=True).start()
    with pytest.raises(Preempted):
        run_program([sys.executable, '-S', '-c', SAVES])
    assert (tmp_path / 'saved').exists()
    assert signal.getsignal(number) is before


@pytest.mark.skipif(sys.platform != 'linux', reason='other systems do not tell children')
def test_a_program_saves_where_this_process_is_killed(tmp_path):
    code = f'from lm.reproduce.program import run_program; run_program({[sys.executable, "-S", "-c", SAVES]})'
    parent = subprocess.Popen([sys.executable, '-c', code], cwd=tmp_path, env=tiny.environment(1))
    wait_for(tmp_path / 'ready')
    parent.kill()
    wait_for(tmp_path / 'saved')
    assert parent.wait() == -signal.SIGKILL
