"""Pipes in the place of a run's files: whoever read one would wait for ever."""

import os
import shutil

import pytest

from lm.cli import main


@pytest.mark.parametrize('name', ['config.gin', 'run.json', 'metrics.jsonl'])
def test_a_pipe_in_the_place_of_a_file_is_named_at_once(name, reference_run, tmp_path, capsys):
    run = tmp_path / 'run'
    shutil.copytree(reference_run[0], run, ignore=shutil.ignore_patterns('checkpoints'))
    (run / name).unlink()
    os.mkfifo(run / name)
    for command in (
        ['inspect', str(run)],
        ['report', str(run), '--out', str(tmp_path / 'out'), '--no_pictures'],
        ['evaluate', '--run_dir', str(run)],
        ['train', '--run_dir', str(run), '--gin_file', 'configs/experiments/quickstart.gin'],
    ):
        assert main(command) == 44, command
        assert f'{name}: is a pipe or a device, not a file; remove it' in capsys.readouterr().err


def test_a_device_behind_a_link_is_named(tmp_path, capsys):
    (tmp_path / 'run').mkdir()
    (tmp_path / 'run' / 'metrics.jsonl').symlink_to('/dev/zero')
    assert main(['train', '--run_dir', str(tmp_path / 'run'), '--gin_file', 'configs/experiments/quickstart.gin']) == 44
    assert 'metrics.jsonl: is a pipe or a device' in capsys.readouterr().err
