"""A run on chips that compute wrongly ends with 45, says which ones, and saves nothing doubtful."""

import json
import re
import subprocess
import sys

import jax
import pytest
import tiny

from lm import cli
from lm.session.trainer import Computation

sys.path.append(str(tiny.ROOT / 'tests' / 'training'))

import chips

FLAGS = tiny.params({'train.steps': 6, 'train.eval_every': None, 'checkpoint.save_every_steps': 1})


def train(run, flags, *more) -> int:
    return cli.main(['train', '--run_dir', str(run), *flags, *FLAGS, *more])


@pytest.fixture
def every_third():
    return ['--set', 'train.replay_every=3']


def test_a_replay_stops_a_run_and_names_the_chip(tiny_flags, every_third, tmp_path, capsys):
    run = tmp_path / 'run'
    with chips.wrong_products(5):
        assert train(run, tiny_flags, *every_third) == 45
    out, error = capsys.readouterr()
    assert 'every 3 steps, names a chip' in out
    line = error.splitlines()[-1]
    assert line.startswith('lm train: error: step 3: cpu:5 on ')
    assert re.search(r'arrays \((loss, )?gradient of ', line), 'the loss may round to the same number'
    assert 'it came again in a repetition' in line
    assert 'the newest checkpoint, step 2, stays' in line
    assert sorted(p.name for p in (run / 'checkpoints').iterdir() if p.name.isdigit()) == ['1', '2']
    (difference,) = json.loads((run / 'run.json').read_text())['differences']
    assert (difference['step'], difference['certain'], difference['stays']) == (3, True, True)
    assert len(tiny.losses(run)) == 2
    # The same command goes on elsewhere. The record stays.
    assert train(run, tiny_flags, *every_third) == 0
    info = json.loads((run / 'run.json').read_text())
    assert len(info['differences']) == 1
    assert info['goodput']['seconds']['replay'] > 0


def test_replays_change_no_bit(tiny_flags, every_third, tmp_path):
    short = tmp_path / 'short'
    assert train(short, tiny_flags, *every_third) == 0
    assert train(tmp_path / 'plain', tiny_flags) == 0
    assert tiny.checksums(short, 6) == tiny.checksums(tmp_path / 'plain', 6)


def test_copies_that_differ_are_not_saved(tiny_flags, tmp_path, monkeypatch, capsys):
    """A bit flips in the memory of device 3 during step 4: the save after it is refused."""
    plain = Computation.__init__

    def damaging(self, step, batches, advance, *rest):
        def wrong(state, batch):
            state, metrics = advance(state, batch)
            if int(state['step']) == 4:
                leaves, tree = jax.tree.flatten(state['params'])
                state['params'] = jax.tree.unflatten(tree, [chips.damage(leaves[0], 3), *leaves[1:]])
            return state, metrics

        plain(self, step, batches, wrong, *rest)

    run = tmp_path / 'run'
    monkeypatch.setattr(Computation, '__init__', damaging)
    assert train(run, tiny_flags) == 45
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith('lm train: error: step 4: cpu:3 on ')
    assert 'copies of one state differ' in line
    assert max(int(p.name) for p in (run / 'checkpoints').iterdir() if p.name.isdigit()) == 3
    (difference,) = json.loads((run / 'run.json').read_text())['differences']
    assert difference['stays'] is None
    assert train(tmp_path / 'unseen', tiny_flags, '--set', 'checkpoint.compare_copies=False') == 0


JOB = """
import sys
sys.path[:0] = ['tests', 'tests/training']
import chips
from lm import cli
with chips.wrong_products(2):
    sys.exit(cli.main(sys.argv[1:]))
"""


def test_all_processes_of_a_job_end_and_name_the_host(tiny_flags, every_third, tmp_path):
    flags = [*tiny_flags, *FLAGS, *every_third, '--coordinator_address', f'localhost:{tiny.free_port()}']
    jobs = [
        subprocess.Popen(
            [sys.executable, '-c', JOB, 'train', '--run_dir', str(tmp_path / 'run'), *flags, *number],
            env=tiny.environment(devices=2),
            cwd=tiny.ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in (['--process_count', '2', '--process_id', str(i)] for i in range(2))
    ]
    try:
        for job in jobs:
            output, _ = job.communicate(timeout=200)
            assert job.returncode == 45, output
            assert '(process 1) computed wrongly: gradients of the same windows differ' in output
    finally:
        for job in jobs:
            job.kill()
