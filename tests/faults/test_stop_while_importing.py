"""A preemption or a Ctrl-C arrives while the program starts."""

import subprocess
import sys

import pytest
import tiny

CODE = """
import os, signal, sys
from lm.cli import main

class Importing:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.Signals[sys.argv[3]])

sys.meta_path.insert(0, Importing())
sys.exit(main(['train', '--run_dir', sys.argv[2], '--gin_param', "data.path = '/nowhere'"]))
"""


STOPPED = 'told to stop (SIGTERM): run the same command again'


def test_a_signal_while_libraries_are_imported_ends_the_program(tmp_path):
    cases = [(name, 'SIGTERM', 42, STOPPED) for name in ('lm.experiment', 'jax', 'flax')]
    for module, number, code, words in [*cases, ('numpy.random', 'SIGINT', 130, 'interrupted')]:
        done = subprocess.run(
            [sys.executable, '-c', CODE, module, str(tmp_path / 'run'), number],
            env=tiny.environment(),
            capture_output=True,
            text=True,
            cwd=tiny.ROOT,
        )
        assert (done.returncode, done.stdout) == (code, ''), done.stderr
        assert done.stderr == f'lm train: {words}\n'
    assert not (tmp_path / 'run').exists()


PROGRAM = """
import os, signal, sys, time
sys.orig_argv = ['lm']  # it is the program
import lm.cli
{}
sys.exit(lm.cli.main(sys.argv[1:]))
"""
WHILE_IMPORTING = """
class Importing:
    def find_spec(self, name, path=None, target=None):
        if name == 'numpy._core.einsumfunc':  # while numpy's C code imports numpy
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Importing())
"""
QUICKLY_OVER = """
import lm.data.prepare.stages
sys.setswitchinterval(10)  # the thread that listens is told when all is over
lm.data.prepare.stages.prepare = lambda *_: os.kill(os.getpid(), signal.NAME)
code = lm.cli.main(sys.argv[1:])
time.sleep(0.5)
sys.exit(code)
"""


def run_prepare(what: str) -> tuple[int, str]:
    command = [sys.executable, '-c', PROGRAM.format(what), 'prepare']
    done = subprocess.run(command, env=tiny.environment(), capture_output=True, text=True, cwd=tiny.ROOT)
    return done.returncode, done.stderr


def test_ctrl_c_during_an_import_is_not_a_failed_import():
    assert run_prepare(WHILE_IMPORTING) == (130, 'lm: interrupted\n')


@pytest.mark.parametrize('name', ['SIGINT', 'SIGTERM', 'SIGHUP'])
def test_a_signal_after_the_imports_ends_with_42_and_one_message(name):
    assert run_prepare(QUICKLY_OVER.replace('NAME', name)) == (
        42,
        'lm prepare: stopped; the same command goes on from here\n',
    )


NOHUP = """
signal.signal(signal.SIGHUP, signal.SIG_IGN)
import lm.data.prepare.stages
lm.data.prepare.stages.prepare = lambda *_: [os.kill(os.getpid(), signal.SIGHUP), print('went on')]
"""


def test_a_closed_terminal_does_not_stop_a_command_under_nohup():
    assert run_prepare(NOHUP) == (0, '')
