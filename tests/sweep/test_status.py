"""`lm sweep --status` reads the state of each point from the folder of the sweep alone."""

import json
import os
import socket
import time

import made_up_runs
import pytest

from lm.attention.softmax import Softmax
from lm.cli import main
from lm.errors import ConfigError
from lm.runs import sweep_file
from lm.runs.lock import RunLock
from lm.sweep.status import read_status


@pytest.fixture
def root(tmp_path):
    """Makes a sweep with a point in each state, named by it."""
    names = ('done', 'running', 'elsewhere', 'vanished', 'ended', 'failed', 'waiting')
    for name in names[:-2]:
        run = made_up_runs.write_run(tmp_path / name, Softmax(), steps=100)
        if name != 'done':
            (run / 'checkpoints' / '100' / 'commit_success.txt').unlink()
    with RunLock(tmp_path / 'running'):
        owner = json.loads((tmp_path / 'running' / 'lock.json').read_text())
        for name, age in (('elsewhere', 12.0), ('vanished', 7200.0)):
            other = owner | {'host': f'not-{socket.gethostname()}', 'renewed': time.time() - age}
            (tmp_path / name / 'lock.json').write_text(json.dumps(other))
        (tmp_path / 'points').mkdir()
        (tmp_path / 'points' / 'failed.json').write_text('{"exit_code": 43, "error": "the loss\\nis NaN"}')
        sweep_file.write_rows(tmp_path, [{'point': n, 'status': 'waiting', 'step': 0, 'steps': 200} for n in names])
        yield tmp_path


def test_the_state_of_each_point(root):
    found = {row['point']: row for row in read_status(root)}
    assert {name: row['status'] for name, row in found.items()} == {
        **{'done': 'done', 'running': 'running', 'elsewhere': 'running', 'vanished': 'interrupted'},
        **{'ended': 'interrupted', 'failed': 'diverged (43)', 'waiting': 'waiting'},
    }
    assert (found['done']['step'], found['done']['steps'], found['done']['silence']) == (100, 100, None)
    assert (found['waiting']['step'], found['waiting']['steps'], found['waiting']['loss']) == (0, 200, None)
    assert found['running']['silence'] < 60
    assert 12 <= found['elsewhere']['silence'] < 60
    last = [json.loads(line) for line in (root / 'done' / 'metrics.jsonl').read_text().splitlines()]
    assert found['done']['loss'] == [r['loss'] for r in last if r['kind'] == 'train'][-1]
    assert found['vanished']['error'] == 'it vanished 2h00m ago, without giving its lock back'
    assert found['ended']['error'] == 'it ended in order, and saved'
    assert found['failed']['error'] == 'the loss\\nis NaN', 'control characters are visible'


def test_the_table(root, capsys):
    assert main(['sweep', '--status', '--run_dir', str(root)]) == 0
    printed = capsys.readouterr().out
    assert 'vanished 2h00m ago' in printed
    assert printed.endswith(f'7 points in {root}: 1 diverged (43), 1 done, 2 interrupted, 2 running, 1 waiting\n')
    assert main(['sweep', '--status', '--run_dir', str(root), '--index', '0']) == 2
    assert main(['sweep', '--status']) == 2


def test_a_folder_of_runs_needs_no_table(root):
    os.unlink(root / 'sweep.json')
    assert [row['point'] for row in read_status(root)] == ['done', 'elsewhere', 'ended', 'running', 'vanished']
    with pytest.raises(ConfigError, match='holds neither a sweep nor runs'):
        read_status(root / 'points')
