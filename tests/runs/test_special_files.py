"""Pipes in the place of a run's files, for which readers would wait for ever, and folders of foreign names."""

import os
import shutil

import pytest
from etils import epath
from made_up_runs import write_run

from lm.attention.softmax import Softmax
from lm.checkpoint.snapshot import find_steps
from lm.cli import main
from lm.doctor.place import check_run
from lm.runs.run_dir import RunDir
from lm.summary.runs import saved_steps


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


FOREIGN = ('²', '٣', '007', '9' * 30, str(2**31), '1 copy')
"""Names of folders that are no steps, though Python takes some of them for digits."""


def test_folders_with_names_like_numbers_are_no_steps(tmp_path):
    run = write_run(tmp_path / 'run', Softmax(), steps=100)
    for name in (*FOREIGN, '12'):
        folder = run / 'checkpoints' / name
        folder.mkdir(parents=True)
        (folder / 'commit_success.txt').touch()
    assert find_steps(epath.Path(run / 'checkpoints')) == [12, 100]
    steps, others = saved_steps(epath.Path(run / 'checkpoints'))
    assert set(others) >= set(FOREIGN)
    assert set(steps) <= {12, 100}
    (run / 'evaluations').mkdir()
    for name in FOREIGN:
        (run / 'evaluations' / f'step-{name}_x.json').write_text('{}')
    assert 'its newest checkpoint is step 100, of 2' in [finding.text for finding in check_run(epath.Path(run))]
    RunDir(run)._abandon_evaluations(3)
    assert sorted(path.name for path in (run / 'evaluations').glob('*.abandoned')) == [
        f'step-{name}_x.json.abandoned' for name in ('007', str(2**31))
    ]
