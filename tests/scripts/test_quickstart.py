"""`scripts/quickstart.sh`: the folder of the run and the flags reach the commands."""

import pathlib
import shutil
import subprocess

import pytest
import tiny

RECORD = '#!/usr/bin/env bash\n[ "$(basename "$0")" = python ] || printf "<%s> " "$@" >> commands.txt\n'
"""A program that notes its arguments, and in place of Python does nothing."""


@pytest.fixture
def clone(tmp_path):
    """Returns a folder with the script and with programs that do nothing."""
    programs = tmp_path / '.venv' / 'bin'
    for folder in (tmp_path / 'scripts', programs):
        folder.mkdir(parents=True)
    for name in ('quickstart.sh', 'install.sh'):
        shutil.copy(tiny.ROOT / 'scripts' / name, tmp_path / 'scripts')
    for name in ('python', 'lm'):
        (programs / name).write_text(RECORD)
        (programs / name).chmod(0o755)
    return tmp_path


def start(clone: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ['bash', str(clone / 'scripts' / 'quickstart.sh'), *arguments], capture_output=True, text=True, cwd='/'
    )


def test_without_arguments_the_run_has_its_usual_place(clone):
    done = start(clone)
    assert done.returncode == 0, done.stderr
    commands = (clone / 'commands.txt').read_text()
    assert '<--run_dir> <runs/quickstart> <evaluate> <--run_dir> <runs/quickstart> <report>' in commands
    assert 'perplexity per token of 20 to 23;' in done.stdout


def test_flags_reach_the_training_alone(clone):
    done = start(clone, 'my runs/short', '--set', 'train.steps=5', '--gin_param', "data.path = 'a b'")
    assert done.returncode == 0, done.stderr
    commands = (clone / 'commands.txt').read_text()
    flags = "<--set> <train.steps=5> <--gin_param> <data.path = 'a b'>"
    assert f'<--run_dir> <my runs/short> {flags} <evaluate> <--run_dir> <my runs/short> <report>' in commands
    assert commands.count(flags) == 1
    assert '20 to 23 without your flags' in done.stdout


@pytest.mark.parametrize(('flag', 'code', 'message'), [('--set', 2, 'name the folder of the run first'), ('-h', 0, '')])
def test_a_flag_in_place_of_the_run_starts_nothing(clone, flag, code, message):
    done = start(clone, flag, 'train.steps=5')
    assert done.returncode == code
    assert message in done.stderr
    assert ('scripts/quickstart.sh [RUN [FLAGS…]]' in done.stdout) == (flag == '-h')
    assert not (clone / 'commands.txt').exists()
