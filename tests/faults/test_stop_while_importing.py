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
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Importing())
sys.exit(main(['train', '--run_dir', sys.argv[2], '--gin_param', "data.path = '/nowhere'"]))
"""


def test_sigterm_while_libraries_are_imported_is_42(tmp_path):
    for module in ('lm.experiment', 'jax', 'flax'):
        done = subprocess.run(
            [sys.executable, '-c', CODE, module, str(tmp_path / 'run')],
            env=tiny.environment(),
            capture_output=True,
            text=True,
            cwd=tiny.ROOT,
        )
        assert (done.returncode, done.stdout) == (42, ''), done.stderr
        assert done.stderr == 'lm train: told to stop (SIGTERM): run the same command again\n'
    assert not (tmp_path / 'run').exists()
