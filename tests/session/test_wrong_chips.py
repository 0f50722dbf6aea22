"""A run on chips that compute wrongly ends with 45, says which ones, and saves nothing doubtful."""

import json
import sys

import pytest
import tiny

from lm import cli

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
    assert 'arrays (loss, gradient of ' in line
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
