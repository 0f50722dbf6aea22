"""The tutorial on adding a mechanism, executed in a fresh checkout: its files, a short training, and generated text."""

import re
import shlex
import shutil
import subprocess
import sys

import pytest
import tiny

PAGE = (tiny.ROOT / 'docs' / 'tutorials' / 'add_a_mechanism.md').read_text()
COMMANDS = [
    line
    for block in re.findall(r'```bash\n(.*?)```', PAGE, re.DOTALL)
    for line in block.splitlines()
    if not line.startswith('scripts/test.sh')
]
SHORT = {'train.steps': 2, 'optimizer.warmup_steps': 1, 'train.eval_tokens': 512}
QUICK = {'bench': ['--repeats', '1'], 'generate': ['--max_tokens', '4']}


@pytest.fixture(scope='module')
def checkout(tmp_path_factory):
    """Copies the files that the commands need."""
    folder = tmp_path_factory.mktemp('checkout')
    for name in ('configs', 'docs', 'lm'):
        shutil.copytree(tiny.ROOT / name, folder / name, ignore=shutil.ignore_patterns('__pycache__', '_build'))
    (folder / 'data').mkdir()
    for recipe in (tiny.ROOT / 'data').glob('*.gin'):
        shutil.copy(recipe, folder / 'data')
    return folder


def test_the_commands_of_the_tutorial_work(checkout, tokens):
    verbs = []
    for line in COMMANDS:
        words = shlex.split(line)
        if words[0] == 'lm':
            verbs.append(words[1])
            data = tiny.params(SHORT | {'data.path': str(tokens)}) if words[1] == 'train' else []
            words = [sys.executable, '-m', *words, *data, *QUICK.get(words[1], [])]
            if words[3] == 'bench':
                words[words.index('--contexts') + 1] = '64'
                words += ['--tokens_per_step' if 'step' in words else '--tokens', '64']
        environment = tiny.environment() | {'PYTHONPATH': str(checkout)}
        done = subprocess.run(words, cwd=checkout, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        if words[3:4] == ['train']:
            assert 'rebased' in done.stdout.splitlines()[0]
    assert verbs == ['train', 'generate', 'bench', 'bench']


def test_the_parts_of_the_module_are_on_the_page():
    module = (tiny.ROOT / 'docs' / 'templates' / 'mechanism' / 'lm' / 'attention' / 'rebased.py').read_text()
    for mark in re.findall(r'^:(?:start-after|end-before): "(.*)"$', PAGE, re.MULTILINE):
        assert module.count(mark) == 1
    for name in re.findall(r'^\| `(\S+)` \|', PAGE, re.MULTILINE):
        assert (tiny.ROOT / 'docs' / 'templates' / 'mechanism' / name).exists()
