"""The script of the study of conversions: its commands are complete, and each student has its own runs."""

import os
import shlex
import subprocess

import pytest
import tiny

from lm import cli

SCRIPT = tiny.ROOT / 'configs/papers/study/distill/convert.sh'


def convert(*arguments):
    variables = os.environ | {'LM': 'echo'}
    return subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, env=variables)


def test_each_stage_of_each_student_is_a_command_of_its_own(reference_run, tmp_path, monkeypatch):
    done = convert(str(reference_run[0]), str(tmp_path / 'students'))
    assert done.returncode == 0, done.stderr
    commands = {}
    for line in done.stdout.splitlines():
        words = shlex.split(line.replace('@adamw()', "'@adamw()'"))
        commands.setdefault(words[words.index('--run_dir') + 1], []).append(words)
    monkeypatch.chdir(tiny.ROOT)
    for run, found in commands.items():
        trained = [words for words in found if '--stage' in words]
        assert len({' '.join(words) for words in trained}) == 1, f'{run}: two trainings'
        for words in found:
            parsed = cli.parse(words)
            if not any(word.endswith('pattern.gin') for word in words):
                assert cli.VERBS['distill'].make_call(parsed)
    names = {run.rpartition('/')[2] for run in commands}
    assert {'window_64', 'window_64_align', 'window_64_alone', 'window_64_full_recall', 'llops', 'polysketch'} <= names


@pytest.mark.parametrize('arguments', [[], ['nowhere'], ['TEACHER', 'ROOT', 'nobody']])
def test_the_script_names_what_is_missing(arguments, reference_run, tmp_path):
    known = {'TEACHER': str(reference_run[0]), 'ROOT': str(tmp_path)}
    done = convert(*(known.get(word, word) for word in arguments))
    assert done.returncode == 2
    assert ('nobody: no such student' if 'nobody' in arguments else 'name the run of the teacher') in done.stderr
