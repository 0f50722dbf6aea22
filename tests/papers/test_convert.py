"""The script of the study of conversions: its commands are complete, and each student has its own runs."""

import os
import shlex
import subprocess
import sys

import pytest
import tiny

from lm import cli

SCRIPT = tiny.ROOT / 'configs/papers/study/distill/convert.sh'


def convert(program, *arguments):
    """Runs the script with `program` in place of lm."""
    variables = os.environ | {'LM': program}
    return subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, env=variables)


def test_each_stage_of_each_student_is_a_command_of_its_own(reference_run, tmp_path, monkeypatch):
    program = tmp_path / 'print_call.py'
    program.write_text('import shlex, sys\nprint(shlex.join(sys.argv[1:]))\n')
    done = convert(f'{sys.executable} {program}', str(reference_run[0]), str(tmp_path / 'students'))
    assert done.returncode == 0, done.stderr
    commands = {}
    for line in done.stdout.splitlines():
        words = shlex.split(line)
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
    assert {'window_64_new_align', 'window_64_new', 'window_64_frozen'} <= names


@pytest.mark.parametrize('arguments', [[], ['nowhere'], ['TEACHER', 'ROOT', 'nobody']])
def test_the_script_names_what_is_missing(arguments, reference_run, tmp_path):
    known = {'TEACHER': str(reference_run[0]), 'ROOT': str(tmp_path)}
    done = convert('echo', *(known.get(word, word) for word in arguments))
    assert done.returncode == 2
    assert ('nobody: no such student' if 'nobody' in arguments else 'name the run of the teacher') in done.stderr
