"""Each verb is one file that describes itself; no function below the verbs sees parsed flags."""

import ast
import shutil
import subprocess
import sys

import pytest
import tiny

from lm.cli import VERBS
from lm.commands.export_run import FORMATS as OFFERED
from lm.interop.formats import FORMATS
from lm.interop.native import NativeFormat

NEW = '''
"""The verb `lm hello`."""

import functools

from lm.commands.verb import Verb


def add_flags(parser):
    parser.add_argument('name')


def make_call(arguments):
    return functools.partial(print, 'hello', arguments.name)


VERB = Verb(place=25, help='greet', example='lm hello you')
'''


def test_each_verb_has_its_own_place_in_the_help():
    places = [verb.place for verb in VERBS.values()]
    assert places == sorted(set(places))
    first, last = (
        ('prepare', 'train', 'distill', 'evaluate', 'generate'),
        ('report', 'bench', 'inspect', 'doctor', 'demo', 'help'),
    )
    assert list(VERBS) == [*first, 'export', 'import', 'check', 'sweep', 'reproduce', *last]


@pytest.mark.parametrize('name', VERBS)
def test_a_verb_describes_itself(name):
    verb = VERBS[name]
    assert verb.name == name
    assert verb.example.startswith(f'lm {name} ')
    assert verb.help[0].islower()
    assert not verb.help.endswith('.')


def test_a_new_verb_is_one_file(tmp_path):
    shutil.copytree(tiny.ROOT / 'lm', tmp_path / 'lm', ignore=shutil.ignore_patterns('__pycache__'))
    (tmp_path / 'lm' / 'commands' / 'hello.py').write_text(NEW)
    environment = tiny.environment() | {'PYTHONPATH': str(tmp_path)}
    for arguments, words in ((['hello', 'you'], 'hello you'), (['--help'], 'hello greet')):
        command = [sys.executable, '-m', 'lm', *arguments]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert words in [' '.join(line.split()) for line in done.stdout.splitlines()]


def test_verbs_import_nothing_heavy_at_the_top():
    for path in sorted((tiny.ROOT / 'lm' / 'commands').glob('*.py')):
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                is_light = name.partition('.')[0] in sys.stdlib_module_names
                is_light |= name == 'lm.errors' or name.endswith('.options') or name.startswith('lm.commands.')
                assert is_light, f'{path.name}: {name}'


def test_the_offered_formats_exist():
    assert set(OFFERED) == {*FORMATS, NativeFormat.name}


def test_no_parsed_flags_below_the_verbs():
    """A function below the verbs may take a parameter `arguments` only if its type describes it."""
    wrong = []
    for path in sorted((tiny.ROOT / 'lm').rglob('*.py')):
        if path.parent.name != 'commands' and path.name != 'cli.py':
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Name | ast.Attribute):
                    word = node.id if isinstance(node, ast.Name) else node.attr
                    wrong += [f'{path.name}:{node.lineno}'] if word == 'Namespace' else []
    assert not wrong
