"""The scripts of the studies of conversions: their commands are complete, and each student has its own runs."""

import os
import re
import shlex
import subprocess
import sys

import pytest
import tiny

import lm
from lm import cli

FOLDER = tiny.ROOT / 'configs/papers/study/distill'


@pytest.fixture
def call(tmp_path):
    """Returns a function that runs a script, whose calls of lm and Python are only printed."""
    program = tmp_path / 'print_call.py'
    program.write_text('import shlex, sys\nprint(shlex.join(sys.argv[1:]))\n')

    def run(script, *arguments):
        variables = os.environ | dict.fromkeys(('LM', 'PYTHON'), f'{sys.executable} {program}')
        return subprocess.run([FOLDER / script, *arguments], capture_output=True, text=True, env=variables)

    return run


@pytest.fixture
def texts(tmp_path):
    """Returns a folder of texts as `real_teacher.sh` takes it."""
    folder = tmp_path / 'texts'
    for name in ('train', 'validation', 'held_out'):
        (folder / name).mkdir(parents=True)
        (folder / name / 'fox.txt').write_text('The quick brown fox jumps over the lazy dog. ' * 40)
    return folder


def find_runs(printed, monkeypatch) -> dict[str, list]:
    """Returns run → its printed commands, after checks that lm takes each, and that a run is trained by one alone."""
    runs = {}
    for line in printed.splitlines():
        words = shlex.split(line)
        if words[0] in cli.VERBS:
            name = words[words.index('--run_dir') + 1] if '--run_dir' in words else ''
            runs.setdefault(name.rpartition('/')[2], []).append(words)
    monkeypatch.chdir(tiny.ROOT)
    for run, found in runs.items():
        trained = [words for words in found if '--stage' in words]
        assert len({' '.join(words) for words in trained}) <= 1, f'{run}: two trainings'
        for words in found:
            parsed = cli.parse(words)
            if not any(word.endswith('pattern.gin') for word in words):
                assert cli.VERBS[words[0]].make_call(parsed)
    return runs


def test_each_stage_of_each_student_is_a_command_of_its_own(call, reference_run, tmp_path, monkeypatch):
    done = call('convert.sh', str(reference_run[0]), str(tmp_path / 'students'))
    assert done.returncode == 0, done.stderr
    names = set(find_runs(done.stdout, monkeypatch))
    assert {'window_64', 'window_64_align', 'window_64_alone', 'window_64_full_recall', 'llops', 'polysketch'} <= names
    assert {'window_64_new_align', 'window_64_new', 'window_64_frozen'} <= names


def test_a_real_teacher_is_converted_in_two_stages_and_measured(call, reference_run, texts, tmp_path, monkeypatch):
    monkeypatch.setenv('FULL', '1')  # the teacher has two layers
    done = call('real_teacher.sh', str(reference_run[0]), str(texts), str(tmp_path / 'real'))
    assert done.returncode == 0, done.stderr
    runs = find_runs(done.stdout, monkeypatch)
    assert list(runs) == ['', 'align', 'chosen', 'student']
    assert ['--choose' in words for words in runs['align']] == [False, True]
    monkeypatch.setenv('PATTERN', '[@window_linear(), @softmax()]')
    given = call('real_teacher.sh', str(reference_run[0]), str(texts), str(tmp_path / 'given'))
    assert given.returncode == 0, given.stderr
    assert '--choose' not in given.stdout
    assert given.stdout.count('model.attention=[@window_linear(), @softmax()]') == 2
    assert re.findall(r'distill/(\w+)\.py', done.stdout) == ['copy_texts', 'held_out', 'needles']


@pytest.mark.parametrize(
    'arguments',
    [
        ['convert.sh'],
        ['convert.sh', 'nowhere'],
        ['convert.sh', 'TEACHER', 'ROOT', 'nobody'],
        ['real_teacher.sh', 'TEACHER'],
    ],
)
def test_the_scripts_name_what_is_missing(call, arguments, reference_run, tmp_path):
    known = {'TEACHER': str(reference_run[0]), 'ROOT': str(tmp_path)}
    done = call(*(known.get(word, word) for word in arguments))
    assert done.returncode == 2
    assert ('nobody: no such student' if 'nobody' in arguments else 'name the run of the teacher') in done.stderr


def test_held_out_texts_have_the_nats_that_the_library_gives(reference_run, texts):
    run, length = str(reference_run[0]), 32
    command = [sys.executable, FOLDER / 'held_out.py', run, '--texts', texts / 'held_out', '--length', str(length)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (nats,) = re.findall(r'\| ([\d.]+) \|$', done.stdout, re.M)
    text = (texts / 'held_out' / 'fox.txt').read_text()
    loaded = lm.load(run, gin_params=[f'evaluate.context_length = {length}'])
    assert float(nats) == pytest.approx(loaded.score(text).nats.mean(), abs=6e-4)


def test_passages_of_training_texts_stand_twice(texts, tmp_path):
    words = ' '.join(map(str, range(1000)))
    (texts / 'train' / 'numbers.txt').write_text(words)
    copies = tmp_path / 'copies'
    command = [sys.executable, FOLDER / 'copy_texts.py', texts, copies, '--characters', '600', '--passage', '50']
    assert subprocess.run(command).returncode == 0
    first, *again = (copies / 'train' / 'numbers.txt').read_text().splitlines()[:12]
    assert first == words[:600]
    assert all(passage in first and len(passage) > 50 for passage in again[:10])
    assert again[:10] != sorted(again[:10], key=first.index)
    assert len(set(again[:10])) == 10
    for name in ('validation/fox.txt', 'held_out/fox.txt'):
        assert (copies / name).read_text() == (texts / name).read_text()
    assert subprocess.run([*command[:2], tmp_path / 'nowhere', copies]).returncode == 2
