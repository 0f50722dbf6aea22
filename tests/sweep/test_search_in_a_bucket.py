"""Several machines on one search in a bucket, with real trainings: one machine dies, and nothing is lost."""

import json
import re
import signal
import subprocess
import sys
import time

import buckets
import pytest
import search_machine
import tiny

from lm import lease
from lm.files import open_path
from lm.runs import sweep_file
from lm.runs.config_diff import parse_bindings

pytest.importorskip('optuna', reason='needs the extra [search]')
pytest.importorskip('s3fs', reason='needs the extra [servers]')

if not buckets.are_available():
    pytest.skip('needs the servers of the extra [servers]', allow_module_level=True)

TRIALS = 6
SPACE = 'optimizer.peak_learning_rate = log_uniform(1e-4, 1e-2)\ncheckpoint.save_every_steps = integers(5, 8)\n'
BEAT = 2.0
"""A lock expires after 12 seconds without a renewal: far more than a busy machine needs."""


@pytest.fixture(scope='module')
def s3(tmp_path_factory):
    with buckets.s3(tmp_path_factory.mktemp('s3')):
        yield open_path(f's3://{buckets.BUCKET}')


@pytest.fixture
def start(s3, tmp_path):
    """Starts a machine, which has a name, on the search in a folder of the bucket."""
    settings = tiny.MODEL | {'data.path': str(tiny.prepare(tmp_path))}
    (tmp_path / 'tiny.gin').write_text(''.join(f'{name} = {value!r}\n' for name, value in settings.items()))
    (tmp_path / 'space.gin').write_text(SPACE)
    program = tmp_path / 'trainer'
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {search_machine.__file__} "$@"\n')
    program.chmod(0o755)
    flags = ['--search', '--trials', str(TRIALS), '--parallel', '2', '--sweep_file', str(tmp_path / 'space.gin')]
    flags += ['--gin_file', str(tmp_path / 'tiny.gin')]

    def start_machine(host, root, *more):
        return subprocess.Popen(
            [sys.executable, search_machine.__file__, *flags, '--run_dir', str(s3 / root), *more],
            env=tiny.environment(TRAINER=str(program), HOST=host, BEAT=str(BEAT), LOOK='0.5'),
            stdout=open(tmp_path / f'{root}-{host}.log', 'ab'),
            stderr=subprocess.STDOUT,
            cwd=tiny.ROOT,
        )

    return start_machine


def find_own(root, host):
    """Returns the trial that a machine trains at the moment and that has a checkpoint; None: there is none."""
    for path in root.glob('trial-*'):
        try:
            owner = json.loads((path / lease.NAME).read_text())['host']
        except OSError:
            continue
        if owner == host and any(path.glob('checkpoints/*/commit_success.txt')):
            return path
    return None


def read_trials(root):
    """Returns the drawn values and the losses of the trials, in their order; each step has come once."""
    found = []
    for number in range(TRIALS):
        run = root / f'trial-{number:04}'
        config = parse_bindings((run / 'config.gin').read_text())
        drawn = [config[name] for name in ('optimizer.peak_learning_rate', 'checkpoint.save_every_steps')]
        losses = tiny.losses(run)
        assert list(losses) == list(range(1, 41)), run.name
        found.append((*drawn, losses, tiny.losses(run, 'eval')))
    return found


@pytest.mark.slow
def test_a_dead_machine_changes_nothing_in_a_search_of_three(start, s3, tmp_path):
    assert start('alone', 'whole', '--jobs', '2').wait(timeout=600) == 0
    machines = {host: start(host, 'shared') for host in 'abc'}
    root, end = s3 / 'shared', time.monotonic() + 300
    while (lost := find_own(root, 'a')) is None:
        assert time.monotonic() < end
        assert machines['a'].poll() is None, (tmp_path / 'shared-a.log').read_text()[-3000:]
        time.sleep(0.1)
    search_machine.kill_machine(machines['a'].pid)
    killed_at = time.monotonic()
    assert machines['a'].wait() == -signal.SIGKILL
    assert json.loads((lost / lease.NAME).read_text())['host'] == 'a', 'the dead machine has left its lock'
    while json.loads((lost / lease.NAME).read_text())['host'] == 'a':
        assert time.monotonic() < killed_at + 60, 'nobody took over the lock of the dead machine'
        time.sleep(0.1)
    assert time.monotonic() - killed_at > 2.5 * BEAT, 'a lock is not taken over without watching it'
    assert [machines[host].wait(timeout=600) for host in 'bc'] == [0, 0]
    assert read_trials(root) == read_trials(s3 / 'whole')
    logs = ''.join((tmp_path / f'shared-{host}.log').read_text() for host in 'abc')
    done = re.findall(r'(trial-\d+): done', logs)
    assert sorted(done) == [f'trial-{number:04}' for number in range(TRIALS)], 'each trial is done once'
    rows = [sweep_file.read_rows(s3 / name) for name in ('shared', 'whole')]
    assert [[row['status'] for row in found] for found in rows] == [['done'] * TRIALS] * 2
    assert sweep_file.read_search(root) == sweep_file.read_search(s3 / 'whole')
    assert not list(root.glob(f'trial-*/{lease.NAME}'))
