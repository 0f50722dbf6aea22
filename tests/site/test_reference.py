"""The generated reference of the site covers the whole code, and the tutorials are right."""

import argparse
import dataclasses
import importlib
import inspect
import pkgutil
import re
import shlex
import subprocess
import sys

import pytest
import tiny

import lm
import lm.ops
from lm.attention import Attention
from lm.config.configurable import REGISTRY, list_fields
from lm.config.setting import write_binding
from lm.errors import ConfigError
from lm.experiment import Experiment, load

sys.path.append(str(tiny.ROOT / 'docs' / 'extensions'))

import lm_reference
from lm_reference import commands, gin, markdown, operations, python


def rows(page: str, title: str) -> str:
    """Returns the part of a page below a heading, up to the next heading of its level or above."""
    level = re.search(rf'^(#+) `{re.escape(title)}`$', page, re.MULTILINE)
    assert level, title
    rest = page[level.end() :]
    end = re.search(rf'^#{{1,{len(level[1])}}} ', rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


@pytest.fixture(scope='module')
def gin_page():
    return gin.page()


@pytest.fixture(scope='module')
def commands_page():
    return commands.page()


def test_every_page_of_the_reference_can_be_filled():
    for path in (tiny.ROOT / 'docs' / 'reference').glob('*.md'):
        filled = lm_reference.fill(path.read_text())
        assert len(filled) > 1000 or 'include' in filled, path
        assert '% generated' not in filled


@pytest.mark.parametrize('name', [name for name, cls in REGISTRY.items() if cls.__module__.startswith('lm.')])
def test_every_field_has_a_row(name, gin_page):
    cls = REGISTRY[name]
    is_section = name in {field.name for field in dataclasses.fields(Experiment)}
    part = rows(gin_page, name if is_section else f'@{name}()')
    if issubclass(cls, Attention):  # the options of all mechanisms stand in one table before their own fields
        shared = gin_page.partition('Each of them has these fields:')[2].partition('\n(')[0]
        part += shared.replace('`NAME.', f'`{name}.')
        assert len(re.findall(r'^\| `NAME', gin_page, re.MULTILINE)) == len(dataclasses.fields(Attention))
    found = {row.split(' | ')[0].strip('| `'): row for row in part.splitlines() if row.startswith('| `')}
    assert set(found) == {f'{name}.{field}' for field in list_fields(cls)}
    for field in list_fields(cls).values():
        row = found[f'{name}.{field.name}']
        assert ('May change on resume' in row) == (field.metadata['resume'] or cls.gin_resume)
        assert len(row.split(' | ')[3]) > 8, 'no help'
        if former := field.metadata['formerly']:
            assert former in row
        for limit in ('minimum', 'maximum', 'above', 'below'):
            if (value := field.metadata['rules'][limit]) is not None:
                assert str(value) in row


def test_every_argument_of_every_verb_has_a_row(commands_page):
    shared = commands.shared()
    assert {'train', 'bench step'} <= commands.verbs().keys()
    for name, parser in commands.verbs().items():
        part = rows(commands_page, f'lm {name}')
        assert f'\nlm {name} ' in part, 'no example'
        for group in parser._action_groups:
            text = part if group.title in commands.PLAIN else shared.get(group.title, '')
            for action in group._group_actions:
                if isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
                    continue
                if action.help is argparse.SUPPRESS:  # a former name, which nobody is to learn
                    assert f'`{action.option_strings[0]}' not in text
                    continue
                for word in action.option_strings or [action.metavar or action.dest]:
                    assert re.search(rf'^\| .*`.*{re.escape(word)}\b', text, re.MULTILINE), f'lm {name} {word}'
            if group.title in shared:
                assert f'[{group.title}](#' in part


def test_every_exit_code_has_a_row(commands_page):
    assert re.findall(r'^\| `(\d+)` \|', commands_page, re.MULTILINE) == ['0', '1', '2', '42', '43', '44', '45']


def test_every_public_name_is_described():
    page = python.page()
    for name in lm.PUBLIC:
        part = rows(page, f'lm.{name}')
        assert len(part) > 60, name
    assert 'rewind_to: int | None = None,' in rows(page, 'lm.train')
    assert 'lm.experiment' not in rows(page, 'lm.configure').partition('```python')[2].partition('```')[0]


def test_every_operation_is_described():
    page = operations.page()
    for name in lm.ops.OPERATIONS:
        module = importlib.import_module(f'lm.ops.{name}')
        part = rows(page, module.__name__)
        for word in module.__all__:
            is_titled = inspect.isfunction(getattr(module, word)) or isinstance(getattr(module, word), type)
            assert f'\n### `{word}`\n' in part if is_titled else word in part


@pytest.mark.parametrize('path', tiny.PAGES, ids=lambda path: path.stem)
def test_python_code_of_the_pages_compiles(path):
    """The code compiles, and each name of `lm` on a page exists."""
    text = path.read_text()
    for block in re.findall(r'```python\n(.*?)```', text, re.DOTALL):
        compile(block, path.name, 'exec')
    for name in set(re.findall(r'(?<![\w./-])lm(?:\.[A-Za-z_]\w*)+(?!\w*[/-])', text)):
        is_file = (tiny.ROOT / name.replace('.', '/')).with_suffix('.py').exists()  # it may need other packages
        assert is_file or pkgutil.resolve_name(name) is not None


def test_python_code_of_the_check_page_runs():
    """It runs in a new process, in which no test has imported a module before."""
    page = (tiny.ROOT / 'docs' / 'check.md').read_text()
    (code,) = re.findall(r'```python\n(.*?)```', page, re.DOTALL)
    done = subprocess.run(
        [sys.executable, '-c', code], cwd=tiny.ROOT, env=tiny.environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert [float(word) > 0 for word in done.stdout.split()] == [True] * 3


@pytest.mark.parametrize('path', tiny.PAGES, ids=lambda path: path.stem)
def test_calls_on_the_pages_need_only_lm_imported(path):
    """`lm.a.b(…)` outside of a block works after `import lm` alone."""
    for first in re.findall(r'`[^`\n]*\blm\.([a-z]\w*)(?:\.\w+)+\(', path.read_text()):
        assert first in lm.PUBLIC, f'lm.{first}'


def test_names_of_pages_become_links():
    assert lm_reference.fill('see `docs/check.md`') == 'see [`docs/check.md`](/check.md)'
    assert lm_reference.fill('`docs/lab/gpu.md#gpu`') == '[`docs/lab/gpu.md#gpu`](/lab/gpu.md#gpu)'
    for name, page in lm_reference.INCLUDED.items():
        assert lm_reference.fill(f'`{name}`') == f'[`{name}`]({page})'
        assert f'../../{name}' in (tiny.ROOT / f'docs{page}').read_text()


def test_prose_is_escaped_and_names_are_code():
    assert markdown.prose('set train.steps, see `a*b` and [1]*2') == r'set `train.steps`, see `a*b` and \[1\]\*2'
    assert markdown.prose('--split NAME of @a/softmax()') == '`--split NAME` of `@a/softmax()`'
    assert markdown.sentence('v4, v5e') == 'v4, v5e.'
    assert markdown.sentence('tokens') == 'Tokens.'
    assert markdown.table(['a'], [['x | y']]).splitlines()[-1] == r'| x \| y |'
    text = 'Does it.\n\nArgs:\n    run_dir: the run,\n        or a name.\n\nReturns:\n    a number.'
    assert markdown.docstring(text).splitlines() == [
        *('Does it.', '', '**Args**', '', '- `run_dir`: the run,', '  or a name.', '', '**Returns**', '', 'a number.')
    ]


def test_the_quotes_of_the_tutorial_work_as_described():
    """`--gin_param` needs two pairs of quotes, of which the shell removes one, and then means the same as `--set`."""
    page = (tiny.ROOT / 'docs' / 'tutorials' / 'your_own_text.md').read_text()
    typed, same = re.search(r'^`--gin_param (.+?)` means the same as `--set (.+?)`', page, re.MULTILINE).groups()
    (received,) = shlex.split(typed)
    assert load((), [received]) == load((), [write_binding(same)])
    with pytest.raises(ConfigError, match='strings in quotes'):
        load((), [received.replace("'", '')])


def test_the_settings_of_the_tutorial_work_as_described():
    """The shell leaves a word, and --set reads it as the table shows."""
    page = (tiny.ROOT / 'docs' / 'tutorials' / 'your_own_text.md').read_text()
    table = re.findall(r'^\| `--set (.+?)` \| ([\w ]+)', page, re.MULTILINE)
    kinds = {'a text': str, 'a number': int, 'a list': tuple, 'yes': bool, 'nothing': type(None)}
    kinds |= {'a mechanism': Attention, 'a text with a variable of the shell and a space': str}
    assert len(table) >= 7
    for typed, meaning in table:
        (word,) = shlex.split(typed)
        section, field = word.split('=')[0].split('.')
        assert isinstance(getattr(getattr(load((), [write_binding(word)]), section), field), kinds[meaning.strip()])
