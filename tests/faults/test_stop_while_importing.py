"""A pod that is taken away while the program starts has not failed."""

import subprocess
import sys

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
